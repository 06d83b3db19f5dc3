"""NCCL's variables: all that Keel sets, in one place, before the process group is formed.

NCCL and torch read each variable once, some with the first communicator, so a later change has no effect. What the
user's environment sets is left as it is. The start-up summary lists all of them.
"""

from collections.abc import Mapping, MutableMapping

from configs.schema import Config

_OTHER_NAMES = {"TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Older names that torch (2.11 to 2.13) still reads."""
KERNELS_IN_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""Makes NCCL start the kernels of communicators that run side by side in one order on all ranks; else they may hang."""
TRACE = "nccl_trace_rank_"
"""The name of a rank's dump of torch's flight recorder, without the rank; `torchfrtrace FOLDER` expects it."""


def nccl_settings(config: Config) -> dict[str, str]:
    """What Keel sets unless the environment does."""
    settings = {
        # When a collective times out, torch writes the last ones of each rank to where Keel's reports of hangs are.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(config.job.folder.absolute() / "hangs" / TRACE),
    }
    return settings | (KERNELS_IN_ORDER if config.comm.streams == "per_group" else {})


def configure_nccl(settings: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Set the variables that the environment does not; call it before the process group is formed."""
    for name, value in settings.items():
        if _OTHER_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)


def nccl_variables(config: Config, environ: Mapping[str, str]) -> str:
    """Every variable that NCCL and torch's use of it read, one a line, with which are not Keel's."""
    ours = nccl_settings(config)
    names = sorted(name for name in environ if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")))
    return "\n".join(
        f"{name} = {environ[name]}{'' if ours.get(name) == environ[name] else ' (from the environment)'}"
        for name in names
    )
