"""A Hugging Face model in full size through Keel and back: python -m tests.real_weights SOURCE WORK

SOURCE is a downloaded folder, or a config.json such as those in tests/published; its weights are then drawn at random.
WORK gets the import and the export (each as large as the weights). The command checks that the export has the bytes of
SOURCE, tensor by tensor, and that the logits of the import in Keel's modules are those of transformers, in float32. It
holds one model at a time.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.export.model_files import checkpoint_files
from scripts.sampling.load import _read_model
from tests.conftest import ROOT

GIB = 2**30


def main() -> None:
    """Run the checks; an assertion fails where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    work = options.work
    source = options.source if options.source.is_dir() else drawn(options.source, work / "source")
    fields = json.loads((source / "config.json").read_text())
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    print(f"{fields['model_type']}, weights of {size / GIB:.2f} GiB")
    keel("import", str(source), str(work / "imported"), "--as-it-is")
    keel("export", str(work / "imported"), str(work / "exported"), "--tokenizer", "none")
    print(f"  {same_tensors(source, work / 'exported')} tensors are equal bit for bit")
    tokens = some_tokens(fields)
    theirs = logits_of_transformers(source, tokens)
    ours = logits_of_keel(work / "imported", tokens)
    difference = (ours - theirs).abs().max().item()
    print(f"  logits of {tuple(tokens.shape)} tokens, float32: largest {theirs.abs().max():.3f}, off {difference:.1e}")
    assert difference <= 1e-5 * theirs.abs().max().item()


def drawn(config: Path, folder: Path) -> Path:
    """Write a folder with a published config.json and random weights, in the dtype that the config names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.read_text())
    torch.manual_seed(0)
    described = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(described, dtype=described.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms begin as constants, which a mistake might keep
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    print(f"{config.stem}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    model.save_pretrained(folder)
    return folder


def keel(*words: str) -> None:
    """Run a command of Keel's, and print the largest memory that it held."""
    command = [sys.executable, str(ROOT / "scripts" / "keel.py"), *words]
    child = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(child, 0)
    assert status == 0, words
    print(f"  keel {words[0]}: {usage.ru_maxrss * 1024 / GIB:.2f} GiB at its peak, {usage.ru_utime:.0f} s")


def same_tensors(source: Path, exported: Path) -> int:
    """Compare all tensors of two folders, one at a time; returns their number."""
    places = {folder: _places(folder) for folder in (source, exported)}
    assert places[source].keys() == places[exported].keys()
    for name in places[source]:
        one, other = (_tensor(places[folder][name], name) for folder in places)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    return len(places[source])


def _places(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def some_tokens(fields: dict[str, Any]) -> Tensor:
    """Tokens, (batch, seq); longer than a sliding window, if there is one."""
    window = fields.get("sliding_window")
    shape = (1, window + 32) if window else (2, 48)
    return torch.randint(fields["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of_transformers(source: Path, tokens: Tensor) -> Tensor:
    """(batch, seq, vocabulary) of the family's own model."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens, use_cache=False).logits


@torch.no_grad()
def logits_of_keel(imported: Path, tokens: Tensor) -> Tensor:
    """(batch, seq, vocabulary) of a checkpoint in Keel's modules."""
    return _read_model(checkpoint_files(imported), imported, torch.device("cpu"), torch.float32)(tokens)


if __name__ == "__main__":
    main()
