"""The sinks that `[metrics]` asks for, checked before anything is built."""

from importlib.util import find_spec
from pathlib import Path

from configs.errors import UserError
from configs.files import is_link, link_refused
from configs.own_code import admit
from configs.schema import Metrics
from trainer.report.sinks.tensorboard import TensorBoard
from trainer.report.sinks.wandb import WandB
from trainer.report.sinks.worker import MakeSink

_LOGIN_SECONDS = 60


def choose_sinks(settings: Metrics, folder: Path, with_own: bool = True) -> dict[str, MakeSink]:
    """The function that opens each sink, by its name for people.

    Args:
        folder: the run folder.
        with_own: also import `metrics.sink`.

    Raises:
        UserError: a package is missing, W&B is not logged in, or there is no class of the name in `metrics.sink`.
        OSError: `tensorboard/` is a link.
    """
    sinks: dict[str, MakeSink] = {}
    if settings.tensorboard:
        if is_link(folder / "tensorboard"):
            raise link_refused(folder / "tensorboard")
        sinks["TensorBoard"] = TensorBoard
    if settings.wandb:
        require_package("wandb", "metrics.wandb = true", "wandb")
        _require_login()
        sinks["W&B"] = WandB
    if settings.sink and with_own:
        sinks[f"metrics.sink {settings.sink}"] = admit(settings.sink, "metrics.sink")
    return sinks


def require_package(name: str, key: str, package: str) -> None:
    """Raise UserError if the package that a setting needs is not installed."""
    if find_spec(name) is None:
        raise UserError(f"{key} needs the package {name}; install it: pip install {package}")


def _require_login() -> None:
    """Log in to W&B, unless it is to work offline; asks on a terminal, as W&B always does."""
    import wandb

    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        is_ready = wandb.login(timeout=_LOGIN_SECONDS)
    except Exception as error:  # W&B's own, without a common base
        raise UserError(f"metrics.wandb = true: {error} Or work offline: WANDB_MODE=offline") from None
    if not is_ready:
        raise UserError("metrics.wandb = true, and W&B is not logged in: wandb login, or WANDB_MODE=offline")
