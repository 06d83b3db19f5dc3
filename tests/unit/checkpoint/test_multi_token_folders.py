"""Modules that predict further tokens in Hugging Face's format: DeepSeek-V3's layout, both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest
from checkpoint.tensor_stream import read_tensor
from configs.errors import UserError
from configs.schema import Model
from tests.unit.hf_support import TINY, make_model, save

DEEP = TINY["deepseek_v3"].model_copy(update={"multi_token": type(TINY["untied"].multi_token)(depth=2)})


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "step-00000001", make_model(DEEP))


@pytest.fixture
def exported(tmp_path, checkpoint):
    warnings = []
    export_hf(checkpoint, tmp_path / "hf", TokenizerFiles(), warn=warnings.append)
    assert not warnings
    return tmp_path / "hf"


def state_of(folder):
    metadata = read_metadata(folder)
    names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    return {name: read_tensor(folder, metadata, name) for name in names}


def edited(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # the mapped file
    save_file(tensors, path)
    (folder / "model.safetensors.index.json").unlink()


def test_an_export_is_in_the_published_layout(exported, checkpoint):
    """As deepseek-ai/DeepSeek-V3 names the tensors of its layer 61, and as vLLM's deepseek_mtp.py reads them."""
    tensors = load_file(exported / "model.safetensors")
    state = state_of(checkpoint)
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 2
    for depth in (0, 1):
        own = f"model.multi_token.{depth}"
        of_layer = f"model.layers.{3 + depth}"
        same = {
            "enorm.weight": f"{own}.enorm.weight",
            "hnorm.weight": f"{own}.hnorm.weight",
            "eh_proj.weight": f"{own}.eh_proj.weight",
            "shared_head.norm.weight": f"{own}.norm.weight",
            "shared_head.head.weight": "model.lm_head.weight",
            "embed_tokens.weight": "model.embed_tokens.weight",
            "self_attn.kv_a_proj_with_mqa.weight": f"{own}.block.self_attn.kv_a_proj_with_mqa.weight",
            "mlp.gate.weight": f"{own}.block.mlp.router.weight",
            "mlp.gate.e_score_correction_bias": f"{own}.block.mlp.router.bias",
        }
        for name, source in same.items():
            assert torch.equal(tensors[f"{of_layer}.{name}"], state[source]), name
        experts = state[f"{own}.block.mlp.experts.up_proj"]
        assert torch.equal(tensors[f"{of_layer}.mlp.experts.5.up_proj.weight"], experts[5])


def test_a_folder_comes_back_bit_equal(exported, checkpoint, tmp_path):
    import_hf(exported, tmp_path / "imported", None)
    found, expected = state_of(tmp_path / "imported"), state_of(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    table = read_manifest(tmp_path / "imported").config["model"]
    assert Model.model_validate(table).multi_token.depth == 2


def test_the_copies_of_a_head_that_is_tied_are_those_of_the_embedding(tmp_path):
    """Of each module two copies of the same tensor follow each other."""
    checkpoint = save(tmp_path / "step-00000001", make_model(DEEP.model_copy(update={"tie_embeddings": True})))
    export_hf(checkpoint, tmp_path / "hf", TokenizerFiles())
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("layers.3.embed_tokens", "layers.3.shared_head.head", "layers.4.shared_head.head"):
        assert torch.equal(tensors[f"model.{name}.weight"], tensors["model.embed_tokens.weight"])
    import_hf(tmp_path / "hf", tmp_path / "imported", None)
    found, expected = state_of(tmp_path / "imported"), state_of(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_folder_without_the_modules_is_the_model_without_them(exported, tmp_path):
    """transformers' own save_pretrained leaves them out, and keeps their number in config.json."""

    def without(tensors):
        for name in [name for name in tensors if name.startswith(("model.layers.3.", "model.layers.4."))]:
            del tensors[name]

    edited(exported, without)
    import_hf(exported, tmp_path / "imported", None)
    assert Model.model_validate(read_manifest(tmp_path / "imported").config["model"]).multi_token.depth is None
    assert not any("multi_token" in name for name in state_of(tmp_path / "imported"))


def test_modules_with_another_head_are_refused(exported, tmp_path):
    edited(exported, lambda tensors: tensors["model.layers.4.shared_head.head.weight"].add_(1))
    message = r"layers\.4\.shared_head\.head\.weight is not lm_head\.weight.*set num_nextn_predict_layers to 0"
    with pytest.raises(UserError, match=message):
        import_hf(exported, tmp_path / "imported", None)


def test_transformers_reads_the_model_itself(tmp_path):
    from transformers import AutoModelForCausalLM

    ours = make_model(DEEP, torch.float64)
    export_hf(save(tmp_path / "step-00000001", ours), tmp_path / "hf", TokenizerFiles())
    ours.rotary.init_buffers()  # angles in float32, as in transformers
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(3, 96, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_other_formats_get_the_model_without_the_modules(tmp_path):
    model = TINY["untied"].model_copy(update={"multi_token": DEEP.multi_token})
    checkpoint = save(tmp_path / "step-00000001", make_model(model))
    warnings = []
    export_hf(checkpoint, tmp_path / "hf", TokenizerFiles(), warn=warnings.append)
    (warning,) = warnings
    assert "LlamaForCausalLM has no modules that predict further tokens" in warning
    import_hf(tmp_path / "hf", tmp_path / "imported", None)
    expected = {name: t for name, t in state_of(checkpoint).items() if "multi_token" not in name}
    found = state_of(tmp_path / "imported")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
