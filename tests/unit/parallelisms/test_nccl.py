"""NCCL's variables: set in one place, before the process group, and never over the user's."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import trainer.run as run_module
from configs.load import load
from parallelisms import nccl
from parallelisms.nccl import (
    KNOWN_BACKEND,
    configure_nccl,
    known_faults,
    nccl_settings,
    nccl_variables,
    version_torch_wants,
    warn_of_faults,
)

ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
DUMP = "TORCH_FR_DUMP_TEMP_FILE"


def job(*words: str):
    return load("debug.toml", words).config


def test_dumps_go_where_the_reports_of_hangs_are(tmp_path: Path):
    settings = nccl_settings(job("--job.output_dir", str(tmp_path)))
    assert settings == KNOWN_BACKEND | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", DUMP: f"{tmp_path}/hangs/nccl_trace_rank_"}


def test_kernels_are_ordered_where_queues_of_gathers_run_side_by_side():
    assert nccl_settings(job("--comm.streams", "per_group"))[ORDER] == "1"
    assert ORDER not in nccl_settings(job("--comm.streams", "shared"))


def test_what_the_environment_sets_is_left_and_announced():
    config = job("--comm.streams", "per_group")
    environ = {ORDER: "0", "NCCL_DEBUG": "INFO", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/traces/rank_", "PATH": "/bin"}
    with patch.dict(os.environ, environ, clear=True):
        configure_nccl(nccl_settings(config), os.environ)
        found = dict(os.environ)
    assert found[ORDER] == "0"
    assert DUMP not in found  # torch would prefer it to the older name
    assert nccl_variables(config, found).splitlines() == [
        "NCCL_DEBUG = INFO (from the environment)",
        f"{ORDER} = 0 (from the environment)",
        "TORCH_DIST_USE_NCCL2 = 0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE = /traces/rank_ (from the environment)",
        "TORCH_NCCL_DUMP_ON_TIMEOUT = 1",
    ]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_variables_are_set_before_the_process_group_is_formed(monkeypatch, tmp_path, kind):
    """NCCL and torch read most of them once: NCCL_LAUNCH_ORDER_IMPLICIT was set after the first communicator."""
    environ: dict[str, str] = {}
    found = {}

    class Formed(Exception):
        """The end of what this test runs."""

    def form(*_):
        found.update(environ)
        raise Formed

    monkeypatch.setattr(run_module, "configure_nccl", lambda settings, _: environ.update(settings))
    monkeypatch.setattr(run_module, "device_type", lambda _: kind)
    monkeypatch.setattr(run_module, "warn_of_faults", lambda *_: None)
    monkeypatch.setattr(run_module, "require_compiler", lambda *_: None)
    monkeypatch.setattr(run_module, "set_numerics", lambda *_: None)
    monkeypatch.setattr(run_module, "start_process_group", form)
    monkeypatch.setattr(run_module, "_end_badly", lambda error, *_: 0 if isinstance(error, Formed) else 1)
    loaded = load("debug.toml", ("--job.output_dir", str(tmp_path), "--comm.streams", "per_group"))
    stop = type("Stop", (), {"launcher": None, "has_lost_launcher": False})()
    assert run_module.run(loaded, stop) == 0
    assert (found.get(ORDER) == "1") == (kind == "cuda")


def test_one_file_names_the_variables_that_are_set():
    root = Path(run_module.__file__).parents[1]
    setters = {
        path.relative_to(root).as_posix()
        for folder in ("checkpoint", "models", "parallelisms", "trainer", "scripts")
        for path in (root / folder).rglob("*.py")
        if any(f'"{prefix}' in path.read_text() for prefix in ("NCCL_", "TORCH_NCCL_", "TORCH_FR_"))
    }
    assert setters == {"parallelisms/nccl.py", "trainer/guards/environment.py"}  # which only reads two


@pytest.mark.parametrize(
    ("loaded", "wanted", "machine", "says"),
    [
        ((2, 28, 9), (2, 28, 9), "x86_64", []),
        ((2, 30, 7), (2, 28, 9), "aarch64", []),
        ((2, 29, 3), None, "aarch64", []),
        ((2, 18, 3), (2, 28, 9), "x86_64", ["NCCL 2.18.3 is loaded, and torch was built with 2.28.9"]),
        ((2, 28, 9), None, "aarch64", ["NCCL 2.28.9 may hang on this processor (aarch64)"]),
        ((2, 27, 5), (2, 28, 9), "aarch64", ["NCCL 2.27.5 is loaded", "NCCL 2.27.5 may hang"]),
    ],
)
def test_versions_that_are_known_to_be_wrong(loaded, wanted, machine, says):
    found = known_faults(loaded, wanted, machine)
    assert len(found) == len(says)
    assert all(fault.startswith(beginning) for fault, beginning in zip(found, says, strict=True))


def test_the_version_that_torch_was_built_with():
    """The line of torch 2.11's package, and a package that names none."""
    line = 'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"'
    assert version_torch_wants(["filelock", line, "triton==3.6.0"]) == (2, 28, 9)
    assert version_torch_wants(["filelock", "nvidia-nccl-cu13>=2.30"]) is None


def test_each_host_of_a_job_of_several_ranks_warns_once(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (1, 0, 0))
    monkeypatch.setattr(nccl.metadata, "requires", lambda _: ["nvidia-nccl-cu13==2.28.9"])
    warnings: list[str] = []
    for rank in ("0", "1"):
        warn_of_faults(warnings.append, {"LOCAL_RANK": rank, "WORLD_SIZE": "2"})
    warn_of_faults(warnings.append, {})
    assert sum("is loaded, and torch was built with 2.28.9" in warning for warning in warnings) == 1
