"""A user's folders with the names of Keel's packages, on PYTHONPATH or in the current folder, do not break Keel."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys

import pytest

import scripts
from tests.conftest import ROOT

COMMAND = "import sys; sys.argv[0] = 'keel'; from keel import run; run()"
"""What the installed program `keel` runs."""
SAY_FOLDERS = f"""
from keel import run
import importlib.util, pathlib
for name in {scripts.NAMES}:
    print(name, pathlib.Path(importlib.util.find_spec(name).origin).is_relative_to({str(ROOT)!r}))
"""


@pytest.fixture
def theirs(tmp_path):
    """A folder with packages of all of Keel's names."""
    folder = tmp_path / "theirs"
    for name in scripts.NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    return folder


def run(*words, path=(), cwd=None):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_top_level_names_are_all_listed():
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
    assert set(scripts.NAMES) == packages | {file.stem for file in ROOT.glob("*.py")}


def test_the_installed_command_finds_its_own_packages(theirs):
    done = run("-c", SAY_FOLDERS, path=(theirs, ROOT / "scripts/entry"))
    assert done.stdout.splitlines() == [f"{name} True" for name in scripts.NAMES], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-c", COMMAND, "train", "debug", "--validate"),
        ("-c", COMMAND, "train", "debug", "--ranks", "2", "--validate"),
        ("-c", COMMAND, "plan", "--help"),
        (ROOT / "train.py", "--config", "debug", "--validate"),
        (ROOT / "scripts/plan.py", "--help"),
        (ROOT / "scripts/keel.py", "plan", "--help"),
    ],
    ids=lambda words: " ".join(str(word).removeprefix(str(ROOT)) for word in words if word != COMMAND),
)
def test_no_command_takes_theirs(theirs, words):
    done = run(*words, path=(theirs, ROOT / "scripts/entry"), cwd=theirs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")])
def test_training_takes_keels_packages_and_the_users_sink(theirs, tmp_path, ranks):
    (theirs / "my_sink.py").write_text(
        "import pathlib\n"
        "class Mine:\n"
        "    def __getattr__(self, name):\n"
        "        return lambda *a, **k: pathlib.Path('seen').write_text(name)\n"
        "    def __init__(self, *a, **k): pathlib.Path('seen').write_text('made')\n"
    )
    sink = ("--metrics.sink", "my_sink:Mine", "--metrics.tensorboard", "false")
    job = ("train", ROOT / "tests/end_to_end/tiny.toml", "--training.steps", "2", *sink, *ranks)
    done = run("-c", COMMAND, *job, path=(theirs, ROOT / "scripts/entry"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").exists()


def test_a_package_that_was_imported_before_is_named(theirs):
    done = run("-c", f"import models\n{COMMAND}", "runs", path=(ROOT / "scripts/entry",), cwd=theirs)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {theirs}/models was imported as models, which is the name of a package of Keel's; rename it\n"
    )


@pytest.fixture
def installed(tmp_path):
    """Keel in a folder like site-packages, with the hashes of its files as pip writes them."""
    site = tmp_path / "site"
    for name in scripts.NAMES:
        if name != "train":
            shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", site)
    shutil.move(site / "scripts/entry/keel", site / "keel")
    record = site / "keel-0.1.0.dist-info/RECORD"
    record.parent.mkdir()
    hashes = {file: hashlib.sha256(file.read_bytes()).digest() for file in site.rglob("*.py")}
    record.write_text(
        "".join(
            f"{file.relative_to(site)},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},1\n"
            for file, digest in hashes.items()
        )
    )
    return site


@pytest.mark.parametrize("words", [("-c", COMMAND, "train", "debug", "--validate"), ("train.py", "--help")])
def test_a_package_installed_over_keels_is_named(theirs, installed, words):
    first, *rest = words
    words = (installed / first, *rest) if first == "train.py" else words
    assert run(*words, path=(theirs, installed)).returncode == 0
    (installed / "models/__init__.py").write_text("# of another package")
    done = run(*words, path=(theirs, installed))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {installed}/models/__init__.py is not Keel's: another package of that name was installed over it. "
        "Install Keel in an environment of its own\n"
    )
