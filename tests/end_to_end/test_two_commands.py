"""`sh scripts/start.sh` and `sh scripts/test.sh`: the environment that they make, and what they say where one cannot be
made. Nothing is fetched: Python and pip are stand-ins that log what they are asked, or find all packages installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT, TINY, status
from tests.end_to_end.test_documented_commands import make_clone

TOOLS = ["awk", "cat", "cksum", "cp", "df", "dirname", "find", "grep", "head", "mkdir", "rm", "sh", "uname"]
PYTHON = """#!/bin/sh
# Stands in for a Python: $VERSION and $LACKS are what it has; its pip logs its words, and ends as $PIP says.
case "$*" in
    *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$TOOLS/keel" "$3/bin/keel" ;;
    *"-m pip --version"*) ;;
    *"-m pip install"*)
        echo "pip $*" >>"$LOG"
        case "$*" in *"--log "*"$FAILS_AT"*) ;; *) exit 0 ;; esac
        case "${PIP-}" in
            killed) kill -9 $PPID ;;
            "") ;;
            *) echo "$PIP" >"$5"; exit 1 ;;
        esac ;;
    *"-m pytest"*) echo "pytest in $PWD: $*" >>"$LOG" ;;
    *importlib.metadata*) exit "${HAS_TORCH-1}" ;;
    *sys.prefix*) echo "$0 Python ${VERSION:-3.12} torch" ;;
    *ensurepip*) test -z "${LACKS-}" || echo "python3, Python $LACKS" ;;
    *) exit 1 ;;
esac
"""
KEEL = """#!/bin/sh
echo "keel in $PWD, launched by $KEEL_LAUNCHER: $*" >>"$LOG"
"""


@dataclass
class Machine:
    """A checkout, and a PATH on which there are only the usual tools and what a test puts there."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tools = self.folder / "tools"
        self.root = self.folder / "a checkout"
        self.venv = self.root / ".venv"
        self.tools.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        for name in ("environment.sh", "start.sh", "test.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool))
        self.program("python3", PYTHON)
        self.program("keel", KEEL)
        self.environment = {"PATH": f"{self.tools}", "TOOLS": f"{self.tools}", "LOG": f"{self.folder / 'log'}"}

    def program(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        (self.tools / name).unlink(missing_ok=True)
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def run(self, command: str = "start.sh", *words: str, code: int = 0, **environment: str) -> str:
        """Run one of the commands from another folder; returns what it has printed."""
        done = subprocess.run(
            ["sh", f"{self.root}/scripts/{command}", *words],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def log(self) -> list[str]:
        """What has been run since the last call."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [re.sub(r"--log \S+( \S+)?/\.venv/pip\.log ", "", line) for line in lines]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_first_time_installs_and_the_second_trains_at_once(machine):
    machine.run()
    launched = f"keel in {machine.folder}, launched by sh '{machine.root}/scripts/start.sh': train"
    installed = ["pip -m pip install torch==2.13.0", f"pip -m pip install -e {machine.root}"]
    assert machine.log() == [*installed, f"{launched} debug.toml"]
    for words, passed_on in [
        ([], "debug.toml"),
        (["--training.steps", "5"], "debug.toml --training.steps 5"),
        (["--config", "my text.toml"], "--config my text.toml"),
        (["--training.steps", "5", "--config=my_text.toml"], "--training.steps 5 --config=my_text.toml"),
        (["my_text.toml", "--ranks", "2"], "my_text.toml --ranks 2"),
    ]:
        assert machine.run("start.sh", *words) == ""
        assert machine.log() == [f"{launched} {passed_on}"]


def test_the_tests_run_in_the_checkout_with_their_own_packages(machine):
    machine.run()
    machine.log()
    tested = f"pytest in {machine.root}: -m pytest"
    machine.run("test.sh", HAS_TORCH="0")
    assert machine.log() == [f"pip -m pip install -e {machine.root}[test]", tested]
    machine.run("test.sh", "tests/unit", "-k", "x or y")
    assert machine.log() == [f"{tested} tests/unit -k x or y"]
    (machine.venv / "keel-installed").unlink()
    machine.run()
    assert len(machine.log()) == 1  # the tests' packages include the others


def test_changed_packages_are_installed_and_another_python_makes_it_again(machine):
    machine.run()
    machine.log()
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    (machine.venv / "kept").touch()
    machine.run(HAS_TORCH="0")
    assert len(machine.log()) == 2
    assert (machine.venv / "kept").exists()
    assert "was made for another Python" in machine.run(VERSION="3.13")
    assert len(machine.log()) == 3
    assert not (machine.venv / "kept").exists()


@pytest.mark.parametrize("fails_at", ["torch", "-e"])
def test_an_interrupted_installation_is_made_again(machine, fails_at):
    machine.run(code=-9, PIP="killed", FAILS_AT=fails_at)
    (machine.venv / "half").touch()
    machine.log()
    assert "is unfinished: making it again" in machine.run()
    assert len(machine.log()) == 3
    assert not (machine.venv / "half").exists()


def test_one_that_another_process_is_making_is_left_alone(machine):
    machine.venv.mkdir()
    (machine.venv / "keel-made").write_text(f"{os.getpid()}\n")
    assert f"process {os.getpid()} is making {machine.venv}" in machine.run(code=1)
    assert machine.venv.exists()


def test_an_environment_of_somebody_else_keeps_what_it_has(machine):
    (machine.venv / "bin").mkdir(parents=True)
    assert "has no Python that runs" in machine.run(code=1)
    shutil.copy(machine.tools / "python3", machine.venv / "bin" / "python")
    shutil.copy(machine.tools / "keel", machine.venv / "bin" / "keel")
    machine.run(HAS_TORCH="0")
    assert [line.partition(" in ")[0] for line in machine.log()] == [f"pip -m pip install -e {machine.root}", "keel"]


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("3.9, is too old", "Keel needs Python 3.11 or newer with the module venv; python3, Python 3.9, is too old"),
        ("3.12, cannot make environments (apt install python3-venv)", "apt install python3-venv"),
    ],
)
def test_a_python_that_will_not_do(machine, lacks, said):
    told = machine.run(code=1, LACKS=lacks)
    assert said in told
    assert told.count("\n") == 1
    assert not machine.venv.exists()


def test_a_newer_python_is_found(machine):
    old = '#!/bin/sh\necho "python3, Python 3.9, is too old"\n'
    machine.program("python3", old)
    machine.program("python3.12", PYTHON)
    assert "with python3.12" in machine.run()


def test_no_python(machine):
    (machine.tools / "python3").unlink()
    assert machine.run(code=1).endswith("there is no Python on the PATH\n")


def test_the_question_that_each_python_is_asked(tmp_path):
    """Asked of real ones: this one, one without ensurepip, and one that says it is older."""
    question = re.search(r"-c '\n(import sys.*?)' \"\$name\"", (ROOT / "scripts/environment.sh").read_text(), re.S)[1]
    old = "import sys; sys.version_info = (3, 10, 1)\n"
    bare = "import sys; sys.modules['ensurepip'] = None\n"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for before, expected in [
        ("", ""),
        (old, "python3, Python 3.10, is too old"),
        (bare, f"(apt install python3-venv, or python{version}-venv)"),
    ]:
        words = [sys.executable, "-c", before + question, "python3"]
        assert expected in subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_too_little_disk(machine):
    machine.program("df", "#!/bin/sh\necho header\necho /dev/x 1 1 2097152 99% /\n")
    assert "has 2 GiB free; the installation needs 3" in machine.run(code=1)
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("Failed to establish a new connection: NewConnectionError", "pip reaches no package index"),
        ("ERROR: something else", "pip could not install torch==2.13.0; its message is above"),
    ],
)
def test_why_pip_failed(machine, log, said):
    assert said in machine.run(code=1, PIP=log, FAILS_AT="torch").splitlines()[-1]
    machine.log()
    machine.run()
    assert len(machine.log()) == 3


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="here is a GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the usual build is for CPUs")
def test_which_torch_is_installed(machine):
    assert "set KEEL_TORCH_INDEX=" in machine.run()
    machine.log()
    shutil.rmtree(machine.venv)
    assert "KEEL_TORCH_INDEX" not in machine.run(KEEL_TORCH_INDEX="file:///wheels")
    assert machine.log()[0] == "pip -m pip install --no-deps --index-url file:///wheels torch==2.13.0"
    shutil.rmtree(machine.venv)
    machine.program("nvidia-smi", "#!/bin/sh\n")
    machine.program("df", "#!/bin/sh\necho header\necho /dev/x 1 1 99999999 9% /\n")
    assert "KEEL_TORCH_INDEX" not in machine.run(KEEL_TORCH_INDEX="file:///wheels")
    assert machine.log()[0] == "pip -m pip install torch==2.13.0"
    shutil.rmtree(machine.venv)
    machine.program("df", "#!/bin/sh\necho header\necho /dev/x 1 1 9999999 9% /\n")
    assert "has 9 GiB free; the installation needs 10" in machine.run(code=1)


def test_one_version_of_torch_everywhere():
    pinned = re.search(r'torch="torch==([0-9.]+)"', (ROOT / "scripts/environment.sh").read_text())[1]
    assert set(re.findall(r"torch==([0-9.]+)", (ROOT / "README.md").read_text())) == {pinned}
    assert f"ARG TORCH_VERSION={pinned}\n" in (ROOT / "Dockerfile").read_text()


@pytest.mark.long  # .ci/run makes its environment with the real pip
def test_with_the_real_pip(tmp_path):
    """In an environment that finds all packages where the tests have them; pip's own variables prevent downloads."""
    clone = make_clone(tmp_path / "clone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (site_packages,) = (clone / ".venv").glob("lib/python*/site-packages")
    (site_packages / "the_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    offline = ENVIRONMENT | {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}

    def command(*words: str, cwd: Path) -> str:
        done = subprocess.run(["sh", *words], cwd=cwd, env=offline, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    start = str(clone / "scripts/start.sh")
    told = command(start, "--config", str(TINY), "--training.steps", "2", cwd=tmp_path)
    assert "Successfully installed keel" in told
    assert re.search(
        r"sh \S+/clone/scripts/start.sh \S+tiny.toml --training.steps 4\b", " ".join(told.replace("\\\n", " ").split())
    )
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("done", 2)
    told = command(start, "--config", str(TINY), "--training.steps", "3", cwd=tmp_path)
    assert "Successfully installed" not in told
    assert status(tmp_path / "run")["step"] == 3
    told = command("scripts/test.sh", "-n", "0", "tests/unit/parallelisms/test_digest.py", cwd=clone)
    assert re.search(r"\d+ passed", told)
