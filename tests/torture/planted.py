"""Faults inside a rank: each function is called by every rank before `train.main`, and plants one."""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.torture.scene import AT, PLANTED


def _mark() -> None:
    path = Path(os.environ[PLANTED])
    if not path.exists():
        path.write_text(str(time.time()))


def _is_rank(number: int) -> bool:
    return os.environ["RANK"] == str(number)


def _before_step(action: Callable[[Any], None], rank: int | None = 1, once: bool = True) -> None:
    """Call `action(learner)` on a rank (None: all) before a step, AT steps into the launch."""
    from trainer.step import Learner

    gradients, done = Learner.gradients, [0]

    @functools.wraps(gradients)
    def patched(self: Learner, *arguments: Any, **named: Any) -> Any:
        done[0] += 1
        is_due = done[0] == AT + 1 or (done[0] > AT and not once)
        if is_due and (rank is None or _is_rank(rank)):
            _mark()
            action(self)
        return gradients(self, *arguments, **named)

    Learner.gradients = patched  # type: ignore[method-assign]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _parameter(learner: Any, suffix: str) -> torch.Tensor:
    return next(p for name, p in learner.parameters.items() if name.endswith(suffix) and _local(p).numel())


def _flip(tensor: torch.Tensor) -> None:
    """The highest bit of a float32's mantissa."""
    with torch.no_grad():
        _local(tensor).detach().view(torch.int32).view(-1)[0] ^= 1 << 22


def nan_in_weight() -> None:
    """One weight of rank 1's shard."""
    _before_step(
        lambda learner: _local(_parameter(learner, "down_proj.weight")).detach().view(-1)[:1].fill_(float("nan"))
    )


def _nan_in_gradient(rank: int | None) -> None:
    from trainer.step import Learner

    norm, due = Learner.grad_norm, [False]
    _before_step(lambda learner: due.__setitem__(0, True), rank)

    def patched(self: Learner, *arguments: Any, **named: Any) -> Any:
        if due[0]:
            due[0] = False
            gradient = next(p.grad for p in self.parameters.values() if p.grad is not None and _local(p.grad).numel())
            _local(gradient).view(-1)[:1].fill_(float("nan"))
        return norm(self, *arguments, **named)

    Learner.grad_norm = patched  # type: ignore[method-assign]


def nan_in_gradient() -> None:
    """On rank 1, after the reduction, before the norm is taken."""
    _nan_in_gradient(1)


def nan_in_gradient_everywhere() -> None:
    """On all ranks."""
    _nan_in_gradient(None)


def nan_in_loss() -> None:
    """Of rank 1, from then on."""
    from trainer.loss import CrossEntropy

    call, due = CrossEntropy.__call__, [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def patched(self: CrossEntropy, *arguments: Any, **named: Any) -> Any:
        loss = call(self, *arguments, **named)
        return loss * float("nan") if due[0] else loss

    CrossEntropy.__call__ = patched  # type: ignore[method-assign]


def inf_in_activation() -> None:
    """Out of one feed-forward on rank 1, from then on."""
    due = [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if due[0] and type(module).__name__ == "FeedForward":
            return output * float("inf")
        return None

    torch.nn.modules.module.register_module_forward_hook(hook)


def flipped_weight() -> None:
    """A bit of a matrix on rank 1."""
    _before_step(lambda learner: _flip(_parameter(learner, "down_proj.weight")))


def flipped_norm() -> None:
    """A bit of a norm on rank 1."""
    _before_step(lambda learner: _flip(_parameter(learner, "norm.weight")))


def flipped_moment() -> None:
    """A bit of a second moment on rank 1."""

    def flip(learner: Any) -> None:
        moments = next(state for state in learner.optimizer.state.values() if _local(state["exp_avg_sq"]).numel())
        _flip(moments["exp_avg_sq"])

    _before_step(flip)


def flipped_snapshot() -> None:
    """A bit of what rank 1 has staged for a checkpoint, before it is written."""
    from checkpoint import store

    write, due = store.write, [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def patched(storage: Any, folder: Path, shards: Any, *arguments: Any, **named: Any) -> Any:
        if due[0]:
            due[0] = False
            for shard in shards.values():
                tensor = next((t for t in vars(shard).values() if isinstance(t, torch.Tensor) and t.numel()), None)
                if tensor is not None and tensor.dtype == torch.float32:
                    _flip(tensor)
                    break
        return write(storage, folder, shards, *arguments, **named)

    store.write = patched


def slow_rank() -> None:
    """Every step of rank 1 takes a tenth of a second longer."""
    _before_step(lambda learner: time.sleep(0.1), once=False)


def slow_data() -> None:
    """Rank 1 waits a tenth of a second for every batch."""
    from trainer.trainer import Trainer

    train = Trainer._train

    def patched(self: Trainer) -> Any:
        source = self.loader

        def late() -> Any:
            for number, batch in enumerate(source):
                if number == AT:
                    _mark()
                if number >= AT:
                    time.sleep(0.1)
                yield batch

        if _is_rank(1):
            self.loader = _Late(source, late())  # type: ignore[assignment]
        return train(self)

    Trainer._train = patched  # type: ignore[method-assign]


class _Late:
    """A loader whose batches come late."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self._loader, self._batches = loader, batches

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def long_step() -> None:
    """A step of all ranks that takes a minute."""

    def last(learner: Any) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)

    _before_step(last, rank=None)


def clock_back() -> None:
    """The clock of rank 0 jumps a day back."""
    now = time.time

    def back(learner: Any) -> None:
        time.time = lambda: now() - 86400

    _before_step(back, rank=0)


def no_memory() -> None:
    """Rank 1 may take no more memory."""
    import resource

    def limit(learner: Any) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        torch.ones(1 << 30)

    _before_step(limit)


def dead_link() -> None:
    """Rank 1 is another host, behind a link that goes down."""
    _before_step(lambda learner: _mark(), rank=0)
    os.environ["GLOO_SOCKET_IFNAME"] = "keel0"
    if _is_rank(1):
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        with open("/run/netns/keel") as space:
            assert libc.setns(space.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        os.environ["GLOO_SOCKET_IFNAME"] = "keel1"
    os.environ["MASTER_ADDR"] = "10.77.9.1"


def other_lr() -> None:
    """Rank 1 is started with another learning rate."""
    sys.argv += ["--optimizer.lr", "3e-2"] if _is_rank(1) else []
    _mark()


def other_seed() -> None:
    """Rank 1 is started with another seed."""
    sys.argv += ["--training.seed", "7"] if _is_rank(1) else []
    _mark()


def other_steps() -> None:
    """Rank 1 is to stop earlier."""
    sys.argv += ["--training.steps", "8"] if _is_rank(1) else []
    _mark()


def other_threads() -> None:
    """Rank 1 computes with two threads."""
    if _is_rank(1):
        os.environ["OMP_NUM_THREADS"] = "2"
        torch.set_num_threads(2)
    _mark()


def other_folder() -> None:
    """Rank 1 sees other files under the same names."""
    if _is_rank(1):
        os.chdir("../other")
    _mark()
