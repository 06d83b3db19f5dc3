"""A job that compiles on a host without a compiler, or without a folder for what is compiled, ends before it begins."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load
from parallelisms import toolchain
from parallelisms.toolchain import c_compiler, require_cache_folders, require_compiler
from tests.end_to_end.launch import ROOT

COMPILED = ("--compile.enable", "true")


@pytest.mark.parametrize(("device", "package"), [("cpu", "g++"), ("cuda", "gcc")])
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, tmp_path, device, package):
    job = load("parity.toml", COMPILED)
    require_compiler(job, device)  # this machine has both
    monkeypatch.setenv("PATH", str(tmp_path))
    require_compiler(load("parity.toml"), device)  # nothing is compiled
    with pytest.raises(ConfigError) as error:
        require_compiler(job, device)
    assert str(error.value).startswith("--compile.enable: torch.compile needs a C")
    assert f"(apt install {package})" in str(error.value)


def test_a_compiler_that_does_not_exist_is_none(monkeypatch):
    assert c_compiler()
    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert c_compiler() is None


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, variable):
    require_cache_folders({variable: str(tmp_path / "new")})
    with pytest.raises(ConfigError, match=f"{variable} is /proc/nowhere, but that folder can't be written"):
        require_cache_folders({variable: "/proc/nowhere"})


def test_kernels_of_a_user_without_a_home_go_to_the_temporary_folder(monkeypatch, tmp_path):
    environment = {}
    monkeypatch.setenv("HOME", str(tmp_path))
    require_cache_folders(environment)
    assert environment == {}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOME", "/proc/nowhere")  # to root, os.access says that /proc can be written
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    require_cache_folders(environment)
    (folder,) = tmp_path.iterdir()
    assert environment == {"TRITON_CACHE_DIR": str(folder)}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_kernels_are_not_kept_where_another_user_may_write(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(toolchain, "_user", lambda: "somebody")
    require_cache_folders(first := {})
    monkeypatch.setattr(os, "getuid", lambda: -1)
    require_cache_folders(second := {})
    assert set(tmp_path.iterdir()) == {Path(first["TRITON_CACHE_DIR"]), Path(second["TRITON_CACHE_DIR"])}
    assert first != second


@pytest.mark.slow
def test_such_a_job_ends_with_one_message(tmp_path):
    words = ["--config", "parity.toml", *COMPILED, "--job.output_dir", "run"]
    for change, said in (
        ({"PATH": str(tmp_path)}, "torch.compile needs a C++ compiler"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/proc/nowhere"}, "TORCHINDUCTOR_CACHE_DIR is /proc/nowhere"),
    ):
        command = [sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | change, capture_output=True, text=True)
        assert done.returncode == 78
        assert said in done.stderr + done.stdout
        assert "Traceback" not in done.stderr + done.stdout
