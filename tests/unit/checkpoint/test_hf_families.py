"""Import and export of models that Keel trains as they are: bit for bit, and as transformers writes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.export.model_files import checkpoint_files, hf_files
from configs.errors import UserError
from scripts.sampling.load import _read_model
from tests.hf_families import FAMILIES, NEEDS_TRANSFORMERS, write_config
from tests.marked import marked

pytestmark = NEEDS_TRANSFORMERS


def published(folder: Path, family: str) -> Path:
    """A folder as someone else publishes it."""
    config = AutoConfig.from_pretrained(write_config(folder, family))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("family", marked(FAMILIES, slow=["llama", "olmo2", "gpt_neox"]))
def test_import_and_export_are_copies(tmp_path, family):
    source = published(tmp_path / "source", family)
    import_hf(source, tmp_path / "imported", None, as_it_is=True)
    export_hf(tmp_path / "imported", tmp_path / "exported", TokenizerFiles())
    before = weights(source)
    after = weights(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "exported")]
    assert configs[0] == configs[1]


def test_an_import_computes_the_same(tmp_path):
    source = published(tmp_path / "source", "mixtral")
    import_hf(source, tmp_path / "imported", None, as_it_is=True)
    files = checkpoint_files(tmp_path / "imported")
    ours = _read_model(files, tmp_path / "imported", torch.device("cpu"), torch.float32)
    tokens = torch.randint(160, (2, 16))
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    assert torch.equal(ours(tokens), theirs(input_ids=tokens, use_cache=False).logits)


def test_a_folder_of_a_family_without_modules_of_keels_is_opened_as_it_is(tmp_path):
    """keel sample reads exports of such families, too."""
    source = published(tmp_path / "source", "gemma3_text")
    ours = _read_model(hf_files(source), source, torch.device("cpu"), torch.float32)
    tokens = torch.randint(160, (2, 16))
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(ours(tokens), theirs(input_ids=tokens, use_cache=False).logits)


def test_missing_weights_are_named(tmp_path):
    source = published(tmp_path / "source", "qwen3")
    from safetensors.torch import save_file

    tensors = weights(source)
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing weights: model\.norm\.weight"):
        import_hf(source, tmp_path / "imported", None, as_it_is=True)


def test_code_in_a_folder_is_refused(tmp_path):
    source = write_config(tmp_path / "source", "qwen3", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(UserError, match="code from installed packages only"):
        import_hf(source, tmp_path / "imported", None, as_it_is=True)
