"""`pip install .`, and as an editable one: the packages, their job files and the command `keel`, from any folder."""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.load import JOB_FILES
from scripts.keel import VERSION
from tests.end_to_end.launch import ENVIRONMENT, ROOT, status
from tests.end_to_end.test_documented_commands import make_clone

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Installed:
    """A virtual environment that has Keel, and everything else from the environment of the tests."""

    environment: Path
    clone: Path
    is_editable: bool

    def run(self, program: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        return subprocess.run(
            [str(self.environment / "bin" / program), *words],
            cwd=cwd,
            env=ENVIRONMENT | {"PATH": f"{self.environment / 'bin'}:{ENVIRONMENT['PATH']}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "editable"])
def installed(request, tmp_path_factory):
    pytest.importorskip("setuptools", minversion="70.1", reason="nothing is fetched here: it builds without wheel")
    folder = tmp_path_factory.mktemp("installed")
    clone, environment = make_clone(folder / "clone"), folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "the_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", *["-e"][: request.param], clone]
    built = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return Installed(environment, clone, request.param)


@pytest.mark.slow
def test_the_packages_and_their_files_are_there(installed, tmp_path):
    names = "checkpoint.export configs.reading configs.checks models parallelisms.guards scripts.benchmarks"
    names += " scripts.page trainer.data"
    program = (
        f"import importlib.util as u; [print(u.find_spec(name).origin) for name in '{names} train'.split()]; "
        "from configs.load import JOB_FILES as files; print(files); print(*(file.name for file in files.glob('*')))"
    )
    done = installed.run("python", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *origins, names = done.stdout.splitlines()
    place = installed.clone if installed.is_editable else installed.environment
    assert all(origin.startswith(f"{place}/") for origin in origins)
    assert {"schema.json", *(file.name for file in JOB_FILES.glob("*.toml"))} <= set(names.split())


@pytest.mark.slow
def test_the_command_answers_from_any_folder(installed, tmp_path):
    assert installed.run("keel", "--version", cwd=tmp_path).stdout == f"keel {VERSION}\n"
    valid = installed.run("keel", "train", "debug", "--validate", "--ranks", "2", cwd=tmp_path)
    assert "debug.toml is valid" in valid.stdout, valid.stderr
    assert "2 ranks: dp_shard 2," in valid.stdout
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    told = installed.run("keel", "report", "run", "--output", "page.html", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "uPlot" in (tmp_path / "page.html").read_text()
    planned = installed.run("keel", "plan", "--help", cwd=tmp_path)
    assert planned.stdout.startswith("usage: keel plan ")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["one process", "torchrun"])
def test_the_command_trains(installed, tmp_path, ranks):
    words = ["--training.steps", "2", "--job.output_dir", "run"]
    done = installed.run("keel", "train", str(ROOT / "tests/end_to_end/tiny.toml"), *words, *ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("done", 2)
    listed = installed.run("keel", "checkpoint", "list", "run", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "\n         2 " in listed.stdout


@pytest.mark.long
def test_the_command_starts_ranks_of_its_own(installed, tmp_path):
    """Workers import what this process runs, which is the command itself."""
    done = installed.run("keel", "parity", "--rows", "DDP 2, none, eager, accumulation 1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 rows within" in done.stdout
