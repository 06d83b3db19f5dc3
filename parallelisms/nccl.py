"""NCCL's variables, all that Keel sets, in one place, and its versions that are known to be wrong.

NCCL and torch read each variable once, some with the first communicator, so a later change has no effect, and the
variables are set before the process group is formed. What the user's environment sets is left as it is. The start-up
summary lists all of them.
"""

import platform
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import metadata

import torch

from configs.schema import Config

Version = tuple[int, ...]

_OTHER_NAMES = {"TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Older names that torch (2.11 to 2.13) still reads."""
KERNELS_IN_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""Makes NCCL start the kernels of communicators that run side by side in one order on all ranks; else they may hang."""
_MENDED_ON_ARM = (2, 29, 3)
"""The first whose queue of network operations keeps its places when a compare-and-swap fails without a reason, as
ARM's may: with 2.28.9, 128 GB200 hung within 350 steps (NCCL's release notes; marin-community/marin, pull 8038)."""
KNOWN_BACKEND = {"TORCH_DIST_USE_NCCL2": "0"}
"""Keeps torch's backend "nccl" as it was until 2.14. Its successor in 2.15 (pytorch/pytorch#192281, which names this
way back) can't abort all communicators in one call, without which a rank that fails doesn't end the others, leaves no
trace of the last collectives where `torchfrtrace` looks for it, and gives every group a communicator, used or not."""
TRACE = "nccl_trace_rank_"
"""The name of a rank's dump of torch's flight recorder, without the rank; `torchfrtrace FOLDER` expects it."""


def nccl_settings(config: Config) -> dict[str, str]:
    """What Keel sets unless the environment does."""
    settings = KNOWN_BACKEND | {
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
    names = sorted(name for name in environ if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_", *KNOWN_BACKEND)))
    return "\n".join(
        f"{name} = {environ[name]}{'' if ours.get(name) == environ[name] else ' (from the environment)'}"
        for name in names
    )


def version_torch_wants(requirements: Sequence[str]) -> Version | None:
    """The version of NCCL that torch was built with, from its package's requirements; None if they name none."""
    for requirement in requirements:
        if found := re.match(r"nvidia-nccl-cu\d+==([\d.]+)", requirement):
            return tuple(map(int, found[1].split(".")))
    return None


def known_faults(loaded: Version, wanted: Version | None, machine: str) -> list[str]:
    """What is known to be wrong with this process's NCCL, a sentence each, which says what to do.

    Args:
        loaded: the version of the library that the process has loaded.
        wanted: the version that torch was built with; None: not known.
        machine: the processor's architecture, as `platform.machine` names it.
    """
    name = _written(loaded)
    faults = []
    if wanted and loaded < wanted:
        faults.append(
            f"NCCL {name} is loaded, and torch was built with {_written(wanted)}: an older library comes first in "
            "LD_LIBRARY_PATH or LD_PRELOAD, which may fail or hang; take it out of there"
        )
    if machine == "aarch64" and loaded < _MENDED_ON_ARM:
        faults.append(
            f"NCCL {name} may hang on this processor ({machine}), in collectives between hosts, without an error: "
            f"{_written(_MENDED_ON_ARM)} has mended it; install a torch that was built with it, or a newer package "
            "nvidia-nccl beside this one"
        )
    return faults


def warn_of_faults(warn: Callable[[str], None], environ: Mapping[str, str]) -> None:
    """Warn of them once on each host of a job of several ranks; torch must be a build with NCCL."""
    if environ.get("LOCAL_RANK", "0") != "0" or int(environ.get("WORLD_SIZE", "1")) == 1:
        return
    try:
        wanted = version_torch_wants(metadata.requires("torch") or [])
    except metadata.PackageNotFoundError:  # not installed as a package
        wanted = None
    for fault in known_faults(torch.cuda.nccl.version(), wanted, platform.machine()):
        warn(fault)


def _written(version: Version) -> str:
    return ".".join(map(str, version))
