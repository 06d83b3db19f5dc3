"""A job in litgpt: its own `pretrain.main`, on random tokens.

It compiles the whole model, keeps its rotary tables and all logits, and its AdamW is fused only on a GPU.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


def version() -> str:
    """The installed version."""
    return version_of("litgpt")


def train(job: dict[str, Any], after_step: Callable[[], None]) -> None:
    """Train without end; see `serve.Train`."""
    if not job["compile"]:
        torch.compiler.set_stance("force_eager")  # pretrain.main always compiles
    precision = "bf16-mixed" if job["compute_dtype"] == "bfloat16" else "32-true"
    fabric = Fabric(devices=1, precision=precision)
    fabric.launch()
    adamw = {"lr": job["lr"], "betas": tuple(job["betas"]), "weight_decay": job["weight_decay"]}
    pretrain.main(
        fabric=fabric,
        devices=1,
        seed=job["seed"],
        initial_checkpoint_dir=None,
        resume=False,
        config=_shape(job),
        data=_RandomTokens(job, after_step),
        out_dir=Path(tempfile.mkdtemp()),
        tokenizer_dir=None,
        tokenizer=None,
        train=TrainArgs(
            save_interval=None,
            log_interval=10**9,
            global_batch_size=job["global_batch_size"],
            micro_batch_size=job["micro_batch_size"],
            max_tokens=10**15,
            max_norm=job["max_norm"],
            min_lr=job["lr"],
            lr_warmup_steps=0,
            tie_embeddings=job["tie_embeddings"],
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, initial_validation=False, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
    )


def _shape(job: dict[str, Any]) -> Config:
    return Config(
        block_size=job["seq_len"],
        n_layer=job["n_layers"],
        n_head=job["n_heads"],
        n_query_groups=job["n_kv_heads"],
        head_size=job["head_dim"],
        n_embd=job["dim"],
        intermediate_size=job["ffn_dim"],
        vocab_size=job["vocab_size"],
        padded_vocab_size=job["vocab_size"],
        rope_base=job["rope_theta"],
        norm_eps=job["norm_eps"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


class _RandomTokens(DataModule):
    """Endless random windows; the loader asks for a step's first window when the step before it is done."""

    def __init__(self, job: dict[str, Any], after_step: Callable[[], None]) -> None:
        self.job, self.after_step = job, after_step

    def connect(self, **_: Any) -> None:
        """Needs neither tokenizer nor batch size."""

    def train_dataloader(self) -> DataLoader:
        """Windows that count the steps."""
        return DataLoader(_Windows(self.job, self.after_step), batch_size=self.job["micro_batch_size"])

    def val_dataloader(self) -> DataLoader:
        """Windows for the check with which litgpt begins."""
        return DataLoader(_Windows(self.job, lambda: None), batch_size=self.job["micro_batch_size"])


class _Windows(IterableDataset):
    def __init__(self, job: dict[str, Any], after_step: Callable[[], None]) -> None:
        self.job, self.after_step = job, after_step

    def __iter__(self) -> Iterator[Tensor]:
        windows = torch.randint(self.job["vocab_size"], (64, self.job["seq_len"] + 1))
        for number in itertools.count():
            if number and number % self.job["global_batch_size"] == 0:
                self.after_step()
            yield windows[number % len(windows)]
