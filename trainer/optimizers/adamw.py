"""AdamW (Loshchilov and Hutter 2019, algorithm 2), by the kernel that the device has.

One fused kernel processes parameters, gradients and both moments at once: for a 10M-parameter model on 2 CPU threads it
takes 6 ms per step where `foreach` takes 24 (with the DTensors of `fully_shard`; without them 5 and 21).

On a CPU the fused kernel computes a tensor's last elements, those that do not fill a vector, by other instructions than
the rest, which round differently. Which elements these are depends on the shards, so exact runs fill them up to a
vector (`kernels/padded.py`).

On a GPU, Keel's own kernel (`kernels/adamw.py`) takes the place of torch's where Triton is installed. What is rounded
stochastically is updated by that kernel or, elsewhere, by separate operations that compute the same bits.
"""

import sysconfig
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.adamw import adamw

from configs.files import exists
from configs.load import LoadedConfig
from configs.schema import Optimizer
from parallelisms.ranks import local_part
from parallelisms.sums import Sums
from parallelisms.toolchain import has_triton
from trainer.kernels import separate
from trainer.kernels.keyed import Key
from trainer.kernels.padded import whole_vectors
from trainer.kernels.separate import Rates
from trainer.optimizers import rule
from trainer.optimizers.build import rounds_stochastically, rule_name
from trainer.optimizers.training import TrainingOptimizer

if TYPE_CHECKING:
    from trainer.kernels.adamw import Group

_FUSED_DEVICES = ("cpu", "cuda")
Kernel = Literal["keel", "torch", "padded", "separate"]
"""keel: kernels/adamw.py; torch: its fused kernel; padded: the same, but for whole vectors alone (kernels/padded.py);
separate: separate operations, which neither skip nor divide."""


class RowAdamW(AdamW, TrainingOptimizer):
    """AdamW over this rank's part of every parameter."""

    def __init__(self, groups: list[dict[str, Any]], kernel: Kernel, keys: Mapping[str, Key], **settings: Any) -> None:
        """Create the optimizer without its state.

        Args:
            groups: as for AdamW, with names if there are `keys`.
            kernel: what updates.
            keys: how each parameter, or its moments, are rounded stochastically, by name; otherwise empty.
            settings: AdamW's.
        """
        super().__init__(groups, fused=kernel in ("torch", "padded"), **settings)
        self.kernel = kernel
        self._keys = keys
        self._tables: dict[int, Group] = {}
        """Keel's kernel for each parameter group, by number."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: None = None,
        skip: Tensor | None = None,
        divisor: Tensor | None = None,
        compute_copies: Mapping[Parameter, Tensor] | None = None,
    ) -> None:
        """Update, on plain tensors: for the DTensors of 300 parameters, torch would take 10 ms of the host's time.

        Args:
            closure: not supported.
            skip: a float32 scalar; 1. leaves parameters and state as they are. Not for the kernel "separate".
            divisor: a float32 scalar by which the gradients are divided. Not for the kernel "separate".
            compute_copies: bfloat16 copies of parameters, of the same shape, to write where there is a gradient.
        """
        copies = compute_copies or {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [""] * len(group["params"])
            trained = [(n, p) for n, p in zip(names, group["params"], strict=True) if p.grad is not None]
            if not trained:
                continue
            if self.kernel == "keel":
                self._step_by_keel(number, trained, copies, skip, divisor)
                continue
            if self._keys:
                self._step_keyed(group, trained)
            else:
                self._step_by_torch(group, [p for _, p in trained], skip, divisor)
            copied = [p for _, p in trained if p in copies]
            if copied:
                torch._foreach_copy_([local_part(copies[p]) for p in copied], [local_part(p.detach()) for p in copied])

    def _apply(self, **arguments: Any) -> None:
        self.step(compute_copies=self.copies.kept if self.copies else None, **arguments)

    def _step_by_torch(
        self, group: dict[str, Any], trained: list[Parameter], skip: Tensor | None, divisor: Tensor | None
    ) -> None:
        names = ("lr", "weight_decay", "eps", "fused", "amsgrad", "maximize")
        settings: dict[str, Any] = {"found_inf": skip, "grad_scale": divisor} | {key: group[key] for key in names}
        settings["beta1"], settings["beta2"] = group["betas"]
        states = [self.state[parameter] for parameter in trained]
        tensors = (
            [local_part(parameter) for parameter in trained],
            [local_part(parameter.grad) for parameter in trained if parameter.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
        )
        steps = [state["step"] for state in states]
        in_vectors = whole_vectors if self.kernel == "padded" else nullcontext
        with in_vectors((*tensors, steps)) as (p, g, m, v, counts):
            adamw(p, g, m, v, [], counts, **settings)

    def _step_keyed(self, group: dict[str, Any], trained: list[tuple[str, Parameter]]) -> None:
        for name, parameter in trained:
            assert parameter.grad is not None
            state = self.state[parameter]
            state["step"] += 1
            separate.update(
                local_part(parameter.detach()),
                local_part(parameter.grad),
                local_part(state["exp_avg"]),
                local_part(state["exp_avg_sq"]),
                int(state["step"]),
                self._keys[name],
                _rates(group),
            )

    def _step_by_keel(
        self,
        number: int,
        trained: list[tuple[str, Parameter]],
        copies: Mapping[Parameter, Tensor],
        skip: Tensor | None,
        divisor: Tensor | None,
    ) -> None:
        from trainer.kernels.adamw import Group, Updated  # needs Triton

        tensors = []
        for name, parameter in trained:
            assert parameter.grad is not None
            state = self.state[parameter]
            copy = copies.get(parameter)
            updated = Updated(
                local_part(parameter.detach()),
                local_part(parameter.grad).contiguous(),
                local_part(state["exp_avg"]),
                local_part(state["exp_avg_sq"]),
                state["step"],
                self._keys[name] if self._keys else None,
                None if copy is None else local_part(copy),
            )
            tensors.append(updated)
        table = self._tables.setdefault(number, Group())
        table.update(tensors, _rates(self.param_groups[number]), skip, divisor)


class Rule(rule.Rule):
    """Two moments of each parameter, and the number of its updates."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if self.config.moments_dtype == "bfloat16" else None
        is_separate = self._kernel(parameter) == "separate"
        return {
            # Kernels count on the device; separate operations read the count on the CPU.
            "step": torch.zeros((), dtype=torch.float32, device="cpu" if is_separate else parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
        }

    def without_state(self, groups: list[dict[str, Any]]) -> RowAdamW:
        parameters = [named[1] if isinstance(named, tuple) else named for group in groups for named in group["params"]]
        kernel = self._kernel(parameters[0]) if parameters else "separate"  # an owner of nothing
        betas = self.config.betas[0], self.config.betas[1]
        return RowAdamW(groups, kernel, self.keys, betas=betas, eps=self.config.eps)

    def skips_on_device(self, device_type: str, dtype: torch.dtype) -> bool:
        return kernel_of_adamw(self.config, device_type, dtype, self.sums) != "separate"

    def _kernel(self, parameter: Tensor) -> Kernel:
        return kernel_of_adamw(self.config, parameter.device.type, parameter.dtype, self.sums)


def kernel_of_adamw(config: Optimizer, device_type: str, dtype: torch.dtype, sums: Sums) -> Kernel:
    """The kernel that updates parameters of this type on this kind of device."""
    is_keyed = rounds_stochastically(config)
    can_be_keels = dtype == torch.float32 or (dtype == torch.bfloat16 and is_keyed)
    if config.kernel == "auto" and device_type == "cuda" and can_be_keels and has_triton():
        return "keel"
    if device_type not in _FUSED_DEVICES or is_keyed:
        return "separate"
    return "padded" if sums.updates_whole_vectors and device_type == "cpu" else "torch"


def require_kernel(job: LoadedConfig, device: torch.device) -> None:
    """Update one element by Keel's kernel where the job uses Triton, before a large model's weights are drawn.

    It takes a second where nothing has been compiled yet, and leaves Keel's and torch.compile's need of Triton proven.

    Raises:
        ConfigError: Triton can't build or launch a kernel on this host.
    """
    optimizer = job.config.optimizer
    key = "compile.enable" if job.config.compile.enable else "optimizer.kernel"
    # Others, such as Muon, leave it some parameters.
    has_adamw = rule_name(optimizer, is_hidden_matrix=False) == "adamw"
    is_used = job.config.compile.enable or (has_adamw and optimizer.kernel == "auto")
    if device.type != "cuda" or not is_used or not has_triton():
        return
    element = torch.zeros(1, device=device)
    rates = Rates(0.0, optimizer.betas[0], optimizer.betas[1], optimizer.eps, 0.0)
    try:
        from trainer.kernels.adamw import Group, Updated

        gradient, exp_avg, exp_avg_sq, step = (torch.zeros_like(element) for _ in range(4))
        updated = Updated(element, gradient, exp_avg, exp_avg_sq, step, key=None, copy=None)
        Group().update([updated], rates, skip=None, divisor=None)
        torch.cuda.synchronize(device)
    except Exception as error:  # of Triton, its compilers and the driver, which have no type in common
        headers = Path(sysconfig.get_path("include"), "Python.h")
        lacks = "" if exists(headers) else f"; {headers} does not exist: install it (apt install python3-dev)"
        raise job.error(
            key,
            f"Triton can't build or launch a kernel on this host ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}{lacks}); mend that, or set compile.enable = false and "
            'optimizer.kernel = "torch"',
        ) from None


def _rates(group: dict[str, Any]) -> Rates:
    beta1, beta2 = group["betas"]
    return Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
