"""The files of docs/own_models.md, as a reader copies them into an empty folder."""

import re
from pathlib import Path

from tests.conftest import ROOT

FILES = {
    '"""GPT-2 (': "my_model.py",
    '"""GPT-2 with a mixture': "my_mixture.py",
    'base = "debug.toml"': "my_model.toml",
    'base = "my_model.toml"': "my_mixture.toml",
    '"""SGD with momentum': "my_rule.py",
    "def parabola": "my_schedule.py",
    "def with_z_loss": "my_loss.py",
    "import numpy": "my_source.py",
}
"""What a block begins with -> the file that the page calls it."""
MODEL = ("--model.architecture", "my_model:GPT2", "--model.options.max_seq_len", "64")
SIZES = {"vocab_size": 256, "dim": 32, "n_layers": 4, "n_heads": 4, "ffn_dim": 64}
WORDS = (*MODEL, *(word for name, size in SIZES.items() for word in (f"--model.options.{name}", str(size))))
"""A small model of the page's class, on a command line."""


def write_files(folder: Path) -> Path:
    """Write the page's files; returns the folder."""
    page = (ROOT / "docs" / "own_models.md").read_text()
    written = set()
    for _, text in re.findall(r"^```(python|toml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (name,) = [name for beginning, name in FILES.items() if text.startswith(beginning)]
        (folder / name).write_text(text)
        written.add(name)
    assert written == set(FILES.values())
    return folder
