"""A job in the transformers Trainer: the class of an export of its model, and `TrainingArguments`, on random tokens.

It keeps all logits in float32, and its Trainer (with accelerate) prepares each batch one step ahead.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import accelerate  # noqa: F401  # the Trainer needs it; without it the message should come at once
import torch
import transformers
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


def version() -> str:
    """The installed version."""
    return transformers.__version__


def train(job: dict[str, Any], after_step: Callable[[], None]) -> None:
    """Train without end; see `serve.Train`."""
    torch.manual_seed(job["seed"])
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10**9,
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=job["global_batch_size"] // job["micro_batch_size"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=job["weight_decay"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        max_grad_norm=job["max_norm"],
        optim="adamw_torch_fused",
        bf16=job["compute_dtype"] == "bfloat16",
        torch_compile=job["compile"],
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data, callback = _Windows(job), _AfterStep(after_step)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job["hf_config"] | {"use_cache": False}))
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()


class _AfterStep(TrainerCallback):
    def __init__(self, after_step: Callable[[], None]) -> None:
        self.after_step = after_step

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After an optimizer step."""
        self.after_step()


class _Windows(IterableDataset):
    """Endless random windows; the model shifts the labels itself."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        windows = torch.randint(self.job["vocab_size"], (64, self.job["seq_len"]))
        for number in itertools.count():
            window = windows[number % len(windows)]
            yield {"input_ids": window, "labels": window}
