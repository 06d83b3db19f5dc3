"""A job in torchtitan: its own `Trainer` and `train_step`, with its Llama 3, on random tokens.

It compiles the blocks and the loss, and computes the loss in chunks. Attention is `scaled_dot_product_attention`, as in
the other frameworks; torchtitan's own choice, FlexAttention with documents masked, has no backward pass on a CPU.
torchtitan is made for GPUs: on a CPU its names of the device are replaced before the rest of it is imported.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version as version_of
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchtitan.tools import utils

if not torch.cuda.is_available():
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda _: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


def version() -> str:
    """The installed version."""
    return version_of("torchtitan")


def train(job: dict[str, Any], after_step: Callable[[], None]) -> None:
    """Train without end; see `serve.Train`."""
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(one_rank)
    trainer = Trainer(_config(job))
    batches = trainer.batch_generator(trainer.dataloader)
    while True:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        after_step()


def _config(job: dict[str, Any]) -> Trainer.Config:
    adamw = {"betas": tuple(job["betas"]), "weight_decay": job["weight_decay"]}
    return Trainer.Config(
        model_spec=_model(job),
        dump_folder=tempfile.mkdtemp(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=job["vocab_size"])),
        tokenizer=_NoTokenizer.Config(),
        dataloader=_Windows.Config(vocab_size=job["vocab_size"]),
        optimizer=default_adamw(lr=job["lr"], **adamw),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=job["micro_batch_size"],
            global_batch_size=job["global_batch_size"],
            seq_len=job["seq_len"],
            max_norm=job["max_norm"],
            steps=10**9,
            mixed_precision_param=job["compute_dtype"],
            disable_cuda_graphs=not torch.cuda.is_available(),
        ),
        metrics=MetricsProcessor.Config(log_freq=10**9),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=job["compile"]),
    )


def _model(job: dict[str, Any]) -> ModelSpec:
    spec = llama3.model_registry("debugmodel")
    dim, vocabulary = job["dim"], job["vocab_size"]
    ones = {"weight": torch.nn.init.ones_}
    normal = {"weight": functools.partial(torch.nn.init.normal_, std=0.02)}
    layers = llama3._build_llama3_layers(
        n_layers=job["n_layers"],
        dim=dim,
        n_heads=job["n_heads"],
        n_kv_heads=job["n_kv_heads"],
        hidden_dim=job["ffn_dim"],
        rope=ComplexRoPE.Config(dim=job["head_dim"], max_seq_len=job["seq_len"], theta=job["rope_theta"]),
        attn_backend="varlen",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=job["tie_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=ones),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=normal),
        layers=layers,
    )
    return spec


class _NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class _Windows(BaseDataLoader):
    """Endless random windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 0

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.windows = torch.randint(config.vocab_size, (8, local_batch_size, seq_len + 1))

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for window in self.windows:
                yield {"input": window[:, :-1].contiguous()}, window[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError
