"""The memory that a block of the model takes for its activations, measured: one block of each kind runs without memory.

The block is the one that trains: the model's own code, with a rank's shard of the matrices and the job's activation
checkpointing. Its tensors are fake: they have shapes, but no memory, so that a block of a 405B model costs as little as
a toy's. Nothing is known here of any model, except whether query heads share keys.

The fake tensors are the CPU's on every machine, so that all ranks, and `keel plan`, find the same bytes. They are found
once: in memory, and in the user's cache folder, by a hash of all that they depend on.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.architectures.parts import n_kv_heads
from configs.layout import MeshSizes, buffer_factor
from configs.plan import plan_of
from configs.schema import ActivationCheckpoint, AnyModel, Config, HfModel, Model, OwnModel
from models import build_model
from parallelisms.activation_checkpoint import apply_activation_checkpoint, selected_layers
from parallelisms.attention.delta import apply_delta_backend, computes_by_kernels
from parallelisms.fake_ranks import mesh_of_a_block, split_blocks
from parallelisms.mesh import Mesh
from parallelisms.torch_internals import count_grouped_queries, fuses_grouped_queries_in_float32
from trainer.planning.block_memory import BlockMemory, measure_eager, norm_of_a_gpu
from trainer.planning.compiled_block import measure_compiled
from trainer.planning.skeleton import skeleton
from trainer.planning.states import always_frozen

_GPU = torch.device("cuda")


def measure_blocks(
    config: Config, layers: Iterable[int], sizes: MeshSizes, on_gpu: bool, mesh: Mesh | None = None
) -> dict[int, BlockMemory]:
    """What each of some layers' blocks takes; each kind of block is measured once.

    Args:
        config, layers: the job, and numbers of its blocks.
        sizes: of the mesh; only the axes that split a block matter.
        on_gpu: whether the job runs on GPUs.
        mesh: the mesh itself, needed in a process group where it splits blocks. Nothing is sent over it.
    """
    model = skeleton(config.model)
    frozen = always_frozen(config, model)
    part = MeshSizes(dp_replicate=1, dp_shard=sizes.ep, tp=sizes.tp, cp=sizes.cp, ep=sizes.ep)
    table = config.activation_checkpoint
    plain = ActivationCheckpoint()
    of_layers = ("layers", "every_nth_layer", "memory_limit_gib")
    everywhere = table.model_copy(update={key: getattr(plain, key) for key in of_layers})
    checkpointed = selected_layers(table, model.plan.n_blocks)
    known: dict[tuple, BlockMemory] = {}
    found: dict[int, BlockMemory] = {}
    for layer in layers:
        own = everywhere if layer in checkpointed or table.mode == "budget" else plain
        first = model.first_of_kind(layer, frozen)  # the same for all ranks of a pipeline, which have different layers
        if (own.mode, first) not in known:
            asked = _Asked(config, first, own, frozenset(model.of_block(first)) & frozen, part, on_gpu)
            known[own.mode, first] = _remembered(asked, mesh)
        found[layer] = known[own.mode, first]
    return found


class _Asked(NamedTuple):
    """A block to measure, and how."""

    config: Config
    layer: int
    checkpointing: ActivationCheckpoint
    """How this block is checkpointed."""
    frozen: frozenset[str]
    """Names of the block's parameters that never train."""
    part: MeshSizes
    """The ranks among which a block is split."""
    on_gpu: bool

    @property
    def key(self) -> str:
        """A hash of all that the answer depends on."""
        training = self.config.training
        context = self.config.context.method, self.config.attention.backend
        factor = buffer_factor(self.config.expert)
        by_kernels = self.on_gpu and computes_by_kernels(self.config, _GPU, tries=False)
        parts = [
            self.config.model.model_dump(mode="json"),
            [training.seq_len, training.compute_dtype, self.config.compile.enable, self.on_gpu, by_kernels],
            [self.layer, sorted(self.frozen), astuple(self.part), context if self.part.cp > 1 else "", factor],
            self.checkpointing.model_dump(mode="json"),
            [_source(), version("transformers") if isinstance(self.config.model, HfModel) else ""],
        ]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _source() -> str:
    """A hash of the code that an answer depends on, and of torch's version."""
    root = Path(__file__).parents[2]
    folders = (root / name for name in ("configs", "models", "parallelisms", "trainer/planning"))
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return sha256(str(torch.__version__).encode() + b"".join(file.read_bytes() for file in files)).hexdigest()


_answers: dict[str, BlockMemory] = {}


def _remembered(asked: _Asked, mesh: Mesh | None) -> BlockMemory:
    """The answer of this process or, from a file, of an earlier one; else the block is measured."""
    key = asked.key
    if key in _answers:
        return _answers[key]
    if isinstance(asked.config.model, OwnModel):  # its code may have changed since an earlier process
        _answers[key] = _measure(asked, mesh)
        return _answers[key]
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel" / "blocks" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):  # there is none, or none that can be read
        kept, moments = json.loads(file.read_text())
        _answers[key] = BlockMemory(kept, tuple((a, g) for a, g in moments))
        return _answers[key]
    answer = _answers[key] = _measure(asked, mesh)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(astuple(answer)))
        written.replace(file)
    return answer


def _measure(asked: _Asked, mesh: Mesh | None) -> BlockMemory:
    config = asked.config
    count_grouped_queries()
    with torch.device("meta"):
        model = build_model(config.model)
    cast_parameters(model, getattr(torch, config.training.compute_dtype))
    plan = plan_of(model)
    name = plan.blocks[asked.layer]
    for other in plan.blocks:
        parent, _, child = other.rpartition(".")
        if other != name and plan.can_be_cut:
            delattr(model.get_submodule(parent), child)
    if asked.on_gpu:
        apply_delta_backend(model, config, _GPU, tries=False)
    # What the process has chosen to compute attention by, as the parity table does, is not the job's choice.
    with sdpa_kernel(_kernels_of_attention(asked)), mesh_of_a_block(asked.part, mesh) as splitting:
        split_blocks(model, config, splitting)
        tokens = torch.Size((1, config.training.seq_len // asked.part.cp))
        with fake_memory(model):
            block = model.get_submodule(name)
            inputs, others = inputs_of(block, model, tokens)
            for parameter_name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter_name not in asked.frozen)
            if config.compile.enable:
                return measure_compiled(block, inputs, others, asked.checkpointing, plan_of(model))
            apply_activation_checkpoint(model, asked.checkpointing)
            with patch.object(F, "rms_norm", norm_of_a_gpu) if asked.on_gpu else nullcontext():
                return measure_eager(block, inputs, others)


def _kernels_of_attention(asked: _Asked) -> list[SDPBackend]:
    """The CPU's, which keep as little as a GPU's, except for grouped queries in float32 before torch 2.14."""
    if not asked.on_gpu or fuses_grouped_queries_in_float32():
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    if asked.config.training.compute_dtype == "float32" and _has_grouped_queries(asked.config.model):
        return [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _has_grouped_queries(model: AnyModel) -> bool:
    """Whether query heads share heads of keys and values; of a model of a user's own that is not known."""
    if isinstance(model, HfModel):
        heads = model.fields.get("num_attention_heads")
        return model.fields.get("num_key_value_heads", heads) != heads
    return isinstance(model, Model) and n_kv_heads(model) != model.n_heads


# --------------------------------------------------------------------------- a block without memory


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters another dtype, but not buffers; not of a model that is split, as a DTensor would ignore it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def fake_memory(model: nn.Module) -> Iterator[None]:
    """Give a model on the meta device fake parameters; it must not be used afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        yield


class _Reached(Exception):
    """Carries a block's inputs out of the model's forward pass, whose rest need not run."""


def inputs_of(block: nn.Module, model: nn.Module, tokens: torch.Size) -> tuple[tuple, dict[str, Any]]:
    """What a model gives to one of its blocks, by position and by keyword, for tokens of a shape."""

    def stop(_block: nn.Module, inputs: tuple[Tensor, ...], others: dict[str, Any]) -> None:
        raise _Reached(inputs, others)

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model(torch.empty(tokens, dtype=torch.int64, device="cpu"))
    except _Reached as reached:
        (first, *inputs), others = reached.args
        return (first.detach().requires_grad_(), *inputs), others
    finally:
        handle.remove()
    raise RuntimeError("the model's forward pass never ran the block")
