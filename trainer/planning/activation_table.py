"""The table shown at start-up: what a block keeps for its backward pass and what it recomputes.

The block runs once on fake tensors, which have shapes, dtypes and a device but no memory, so a block of a 405B model
costs as little as a toy's. The table records the ops that create tensors and the tensors that autograd asks to keep;
the rest follows from the checkpointing mode. It is exact in eager mode for one device that holds whole matrices:
torch.compile fuses ops and keeps at most as much, and tensor parallelism divides most rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.plan import plan_of
from configs.schema import ActivationCheckpoint
from parallelisms.activation_checkpoint import Selection, matrices, select, selected_layers
from trainer.planning.activations import cast_parameters, fake_memory, inputs_of

Fate = Literal["saved", "recomputed", "not needed"]


@dataclass
class ActivationRow:
    """Calls of one op with the same fate."""

    op: str
    """The op, e.g. "aten.mm"; "input" is the block's input."""
    matrix: str
    """Name, within the block, of the matrix that is multiplied; empty if there is none."""
    fate: Fate
    """saved: kept until backward; recomputed: freed and computed again in backward; not needed: freed."""
    times: int = 0
    bytes_per_token: float = 0.0
    """Bytes of all outputs together, per token."""


@dataclass(frozen=True)
class ActivationTable:
    """The rows of a checkpointed block, and the totals over all blocks."""

    rows: list[ActivationRow]
    n_layers: int
    n_checkpointed: int
    plain_bytes_per_token: float
    """Bytes per token that a block keeps without checkpointing."""
    memory_budget: float | None = None
    """Fraction of that which mode `budget` lets the compiler keep; its choice is unknown before it compiles."""

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes per token that a block of this table keeps."""
        return _saved(self.rows)

    @property
    def model_bytes_per_token(self) -> float:
        """Bytes per token that all blocks keep, checkpointed or not."""
        plain = (self.n_layers - self.n_checkpointed) * self.plain_bytes_per_token
        return self.n_checkpointed * self.saved_bytes_per_token + plain

    def __str__(self) -> str:
        """Format the table for a console: 74 columns wide, so that it fits 80 with an indentation."""
        lines = [f"{'op (of aten)':43}{'times':>6}{'bytes/token':>13}  fate"]
        for row in self.rows:
            op = f"{row.op.removeprefix('aten.')} {row.matrix}"
            lines.append(f"{op:43}{row.times:6}{row.bytes_per_token:13,.0f}  {row.fate}")
        lines.append(f"{'kept by such a block':49}{self.saved_bytes_per_token:13,.0f}")
        lines.append(f"{'kept by a block without checkpointing':49}{self.plain_bytes_per_token:13,.0f}")
        lines.append(f"{f'kept by all {self.n_layers} blocks':49}{self.model_bytes_per_token:13,.0f}")
        if self.memory_budget is not None:
            lines.append(f"the compiler keeps about {self.memory_budget:.0%} of this, not counting the inputs")
        return "\n".join(lines)


@dataclass
class _Call:
    """One call of an op, with the storages that it created."""

    op: Any
    matrix: str
    storages: dict[int, int]  # id -> bytes


class _Recorder(TorchDispatchMode):
    """Records which ops create which storages, and which of these autograd keeps."""

    def __init__(self, block: nn.Module, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.kept: set[int] = set()
        self.n_needed = 0  # calls until autograd had everything that it keeps; a recomputation stops there
        self.matrix = ""
        self.alive: list[Tensor] = []  # keeps tensors alive, so that no storage's id is reused
        self.known = {_storage(tensor) for tensor in given}
        for name, module in matrices(block).items():
            module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "matrix", name))
            module.register_forward_hook(lambda *_: setattr(self, "matrix", ""))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = op(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        made = {_storage(t): t.untyped_storage().nbytes() for t in tensors if _storage(t) not in self.known}
        self.alive += tensors
        self.known |= made.keys()
        self.calls.append(_Call(op, self.matrix, made))
        return outputs

    def keep(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd keeps for backward; autograd calls this."""
        self.kept.add(_storage(tensor))
        self.n_needed = len(self.calls)
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def activation_table(
    model: nn.Module,
    config: ActivationCheckpoint,
    seq_len: int,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> ActivationTable:
    """The table of the first checkpointed block; if `config` checkpoints none, or by a budget, of a plain block.

    Args:
        model: as built on the meta device, before any technique; it must not be used afterwards.
        config: what to keep.
        seq_len: tokens per sequence.
        compute_dtype: dtype of the parameters in the forward pass.
        device: where the run takes place. It must exist here, since it decides which op computes attention.

    Raises:
        ConfigError: as in `apply_activation_checkpoint`.
    """
    plan = plan_of(model)
    layers = selected_layers(config, len(plan.blocks)) if config.mode in ("full", "selective") else []
    name = plan.blocks[layers[0] if layers else 0]
    recorder, input_bytes = _record(model, name, seq_len, compute_dtype, device)
    plain = rows = _rows(input_bytes, seq_len, _plain_fates(recorder))
    if layers:
        selection = Selection((), ())
        if config.mode == "selective":
            selection = select(model.get_submodule(name), config, plan.save_ops)
        rows = _rows(input_bytes, seq_len, _checkpointed_fates(recorder, selection))
    budget = config.memory_budget if config.mode == "budget" else None
    return ActivationTable(rows, len(plan.blocks), len(layers), _saved(plain), budget)


def _record(
    model: nn.Module, name: str, seq_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[_Recorder, int]:
    """Run the block `name` on one sequence and record it; also returns the bytes of its input."""
    block = model.get_submodule(name)
    cast_parameters(model, dtype)
    with fake_memory(model, device):
        inputs, others = inputs_of(block, model, torch.Size((1, seq_len)), device)
        given = tree_leaves((inputs, others))
        recorder = _Recorder(block, [t for t in (*given, *block.parameters()) if isinstance(t, Tensor)])
        with saved_tensors_hooks(recorder.keep, lambda tensor: tensor), recorder:
            block(*inputs, **others)
    return recorder, inputs[0].untyped_storage().nbytes()


def _plain_fates(recorder: _Recorder) -> Iterator[tuple[_Call, Fate, int]]:
    """Each call's bytes by fate, without checkpointing."""
    for call in recorder.calls:
        saved = sum(size for storage, size in call.storages.items() if storage in recorder.kept)
        yield call, "saved", saved
        yield call, "not needed", sum(call.storages.values()) - saved


def _checkpointed_fates(recorder: _Recorder, selection: Selection) -> Iterator[tuple[_Call, Fate, int]]:
    """Each call's bytes by fate, if everything is recomputed that `selection` does not keep."""
    for i, call in enumerate(recorder.calls):
        fate: Fate = "recomputed" if i < recorder.n_needed else "not needed"
        yield call, "saved" if selection.keeps(call.op.name(), call.matrix) else fate, sum(call.storages.values())


def _rows(input_bytes: int, seq_len: int, fates: Iterator[tuple[_Call, Fate, int]]) -> list[ActivationRow]:
    """Sum up calls of the same op, matrix and fate; views and other ops that create no tensor are left out."""
    rows = {("input", "", "saved"): ActivationRow("input", "", "saved", 1, input_bytes / seq_len)}
    for call, fate, size in fates:
        if size:
            op = call.op.name().replace("::", ".")
            row = rows.setdefault((op, call.matrix, fate), ActivationRow(op, call.matrix, fate))
            row.times += 1
            row.bytes_per_token += size / seq_len
    return list(rows.values())


def _saved(rows: list[ActivationRow]) -> float:
    return sum(row.bytes_per_token for row in rows if row.fate == "saved")
