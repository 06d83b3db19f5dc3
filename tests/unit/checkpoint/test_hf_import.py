"""Imports: what transformers has saved comes back bit by bit, and what Keel can't train is refused by name."""

import json
import os
import shutil
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint.export.hf_config import tensor_shapes, to_hf, to_keel, unknown_fields
from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import MODEL_TOML, import_hf
from checkpoint.export.model_files import checkpoint_files, hf_files
from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest
from checkpoint.tensor_stream import read_tensor
from configs.architectures.llama_keys import RopeScaling, Router, computed, is_rotated, window_of
from configs.errors import UserError
from configs.exportable import not_exportable
from configs.layout import parameter_count
from configs.load import load
from configs.schema import Model
from models import build_model
from scripts import import_hf as script
from tests.conftest import ROOT
from tests.unit.hf_support import TINY, make_model, save
from trainer.stages import saved_buffers

NO_TOKENIZER = TokenizerFiles()
MISTRAL, OLMO3, SMOLLM3, GEMMA3 = (
    {"model_type": name, "architectures": ...} for name in ("mistral", "olmo3", "smollm3", "gemma3_text")
)
QWEN2_MOE, QWEN3_NEXT, DEEPSEEK_V3 = (
    {"model_type": name, "architectures": ...} for name in ("qwen2_moe", "qwen3_next", "deepseek_v3")
)
DEEPSEEK_V3 |= {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "mscale_all_dim": 1.0}
FULL = "full_attention"
NEAR = "sliding_attention"
MANY_LAYERS = {"num_hidden_layers": 10_000, "layer_types": ["linear_attention"] * 9_999 + [FULL]}
DTYPES = {"tied": "bfloat16", "qwen3": "bfloat16", "gemma3": "bfloat16"}


def state_of(folder):
    """All tensors of a checkpoint."""
    metadata = read_metadata(folder)
    assert read_manifest(folder).files.keys() >= {"__0_0.distcp", ".metadata"}
    return {name: read_tensor(folder, metadata, name) for name in metadata.state_dict_metadata}


@pytest.fixture
def exported(tmp_path):
    """A Hugging Face folder in two files."""
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["untied"]))
    export_hf(checkpoint, tmp_path / "hf", NO_TOKENIZER, max_shard_bytes=40_000)
    return tmp_path / "hf"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize("name", sorted(set(TINY) - {"mixtral", "long"}))
def test_save_pretrained_comes_back_bit_equal(tmp_path, name, capsys):
    from transformers import AutoModelForCausalLM

    dtype = DTYPES.get(name, "float32")
    model = make_model(TINY[name])
    export_hf(save(tmp_path / "step-00000001", model), tmp_path / "out", NO_TOKENIZER, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert script.main([str(tmp_path / "saved"), str(tmp_path / "back")]) == 0
    assert "does not know" not in capsys.readouterr().err
    back = state_of(tmp_path / "back")
    expected = {f"model.{name}": parameter.to(getattr(torch, dtype)) for name, parameter in model.named_parameters()}
    expected |= {f"model.{name}": buffer for name, buffer in saved_buffers(model)}
    assert back.keys() == expected.keys()
    assert all(
        back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in expected.items()
    )
    manifest = read_manifest(tmp_path / "back")
    assert manifest.config["training"]["dtype"] == dtype
    assert build_model(Model.model_validate(manifest.config["model"])).config == load_model_toml(tmp_path / "back")
    export_hf(tmp_path / "back", tmp_path / "again", NO_TOKENIZER)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_fields_that_keel_does_not_know_are_named(exported, tmp_path, capsys):
    edit_config(exported, mup_alpha=3.0, a_new_gate=True)
    assert script.main([str(exported), str(tmp_path / "back")]) == 0
    found = " ".join(capsys.readouterr().err.split())
    assert "fields that Keel does not know; the import is without them: a_new_gate, mup_alpha" in found


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "axes": 3}, "rope_scaling": None},
            ["rope_parameters.axes"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32, "ramp": "cosine"}},
            ["rope_scaling.beta_fast", "rope_scaling.ramp"],
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    FULL: {"rope_type": "default", "rope_theta": 1e6, "ramp": 1},
                    NEAR: {"rope_type": "default", "rope_theta": 1e4, "temper": 2},
                    "third": {},
                },
            },
            [
                "rope_parameters.full_attention.ramp",
                "rope_parameters.sliding_attention.temper",
                "rope_parameters.third",
            ],
        ),
        *(
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": older}, ["rope_scaling"])
            for older in ("yarn", ["yarn"], 2, True)
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": {"rope_type": [1]}}, []),
        (
            {"model_type": "gemma3_text", "rope_parameters": {FULL: {"rope_theta": 1e6}}, "rope_scaling": {NEAR: 2}},
            [f"rope_scaling.{NEAR}"],
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {FULL: {"rope_theta": 1e6}}, "rope_scaling": "yarn"},
            ["rope_scaling"],
        ),
    ],
)
def test_unknown_fields_of_the_rotary_frequencies_are_named(fields, unknown):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"model_type": "llama", "intermediate_size": 64, "vocab_size": 96}
    assert unknown_fields(sizes | fields, "config.json") == unknown


def test_what_predicts_further_tokens_of_a_hybrid_is_left_out_and_named(tmp_path, capsys):
    """transformers ignores these tensors of the published Qwen3-Next without a word."""
    export_hf(save(tmp_path / "step-00000001", make_model(TINY["qwen3_next_moe"])), tmp_path / "hf", NO_TOKENIZER)
    file = tmp_path / "hf/model.safetensors"
    further = {"mtp.fc.weight": torch.ones(4, 8), "mtp.layers.0.mlp.gate.weight": torch.ones(4, 4)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert "the import is without their 2 tensors, such as mtp.fc.weight" in " ".join(capsys.readouterr().err.split())
    saved = state_of(tmp_path / "step-00000001")
    assert state_of(tmp_path / "back").keys() == {name for name in saved if name.startswith("model.")}


def test_deepseek_v3_as_it_is_published():
    """The fields of deepseek-ai/DeepSeek-V3's config.json, but for its 8-bit weights."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    found = to_keel(published, "config.json")
    assert unknown_fields(published, "config.json") == []
    trained = load("deepseek_v3").config.model
    mscale = 0.1 * log(40) + 1
    stretched = {"kind": "yarn", "factor": 40, "original_seq_len": 4096, "attention_factor": 1.0}
    assert found.query_scale == pytest.approx(192 / mscale**4, rel=1e-15)
    assert found.rope_scaling == RopeScaling(**stretched)
    changed = {"rope_scaling": None, "query_scale": None, "router": trained.router}
    assert found.router == Router(
        **trained.router.model_dump() | {"load_balance": "bias", "auxiliary_loss_weight": 0.01}
    )
    assert computed(found.model_copy(update=changed)) == computed(trained)
    assert found.multi_token.depth == 1
    again = to_hf(found, "bfloat16", 163840, 0, 1)
    assert again["rope_parameters"]["mscale_all_dim"] == 1.0
    assert to_keel(again, "config.json") == found
    for field, value in (("topk_method", "greedy"), ("rope_interleave", False), ("num_key_value_heads", 8)):
        with pytest.raises(UserError, match=field):
            to_keel(published | {field: value}, "config.json")


def load_model_toml(folder):
    """The [model] of a job that takes the import as its base; the weights are found by one key more."""
    job = folder.parent / "job.toml"
    job.write_text(
        f'base = "{folder.name}/model.toml"\njob.name = "more"\ntraining = {{steps = 1, seq_len = 8, '
        "global_batch_size = 1}\n"
        'optimizer.lr = 1e-3\nlr_schedule.total_steps = 1\n[[data.sources]]\nname = "x"\nkind = "synthetic"\n'
    )
    return load(str(job)).config.model


def test_a_model_keeps_its_longest_sequence(exported, tmp_path):
    """A model for 64 tokens that is trained further on 8; its rotary scaling is made for 128."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = scaling | {"original_max_position_embeddings": 16}
    edit_config(exported, max_position_embeddings=64, rope_parameters=..., rope_scaling=rope)
    import_hf(exported, tmp_path / "import", None)
    model = load_model_toml(tmp_path / "import")
    assert checkpoint_files(tmp_path / "import").seq_len == hf_files(exported).seq_len == 64
    assert to_hf(model, "float32", 8, None, None)["max_position_embeddings"] == 64
    assert to_hf(model, "float32", 96, None, None)["max_position_embeddings"] == 96


def test_an_import_into_a_bucket_advises_a_base_on_a_disk(exported, tmp_path):
    """Job files have no base in object storage."""
    import_hf(exported, tmp_path / "import", None, place="s3://bucket/import")
    heading = (tmp_path / "import" / MODEL_TOML).read_text().partition("[model]")[0]
    assert "in a job file beside a copy of this file:\n" in heading
    assert 'base = "model.toml", and in [checkpoint] init_from = "s3://bucket/import"' in heading


def test_qwen3_0_6b_as_it_is_published():
    """The fields of Qwen/Qwen3-0.6B's config.json of April 2025."""
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    job = load("qwen3_0.6b").config.model
    assert to_keel(published, "config.json") == job.model_copy(update={"max_seq_len": 40960})
    with pytest.raises(UserError, match="use_sliding_window = True is not supported; Keel's Qwen3 has False"):
        to_keel(published | {"use_sliding_window": True}, "config.json")
    with pytest.raises(UserError, match="attention_bias = True"):
        to_keel(published | {"attention_bias": True}, "config.json")


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b", "8b", "14b", "32b"])
def test_job_files_of_qwen3_are_models_of_transformers(size):
    """Names and shapes of transformers' own class, which reads what an export of the job would write."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = load(f"qwen3_{size}").config.model
    with torch.device("meta"):
        theirs = Qwen3ForCausalLM(Qwen3Config(**to_hf(model, "bfloat16", 4096, 1, 2)))
        theirs.tie_weights()  # transformers 5.0 leaves what is built on the meta device untied
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert shapes == tensor_shapes(model)
    assert theirs.num_parameters() == parameter_count(model)


@pytest.mark.parametrize(
    ("file", "job", "changes"),
    [
        ("olmo-2-1b", "olmo2_1b", {"n_kv_heads": 16}),
        ("smollm3-3b", "smollm3_3b", {"rope_theta": 5e6}),  # the job is its first stage's
    ],
)
def test_families_as_they_are_published(file, job, changes):
    """The fields of their config.json files, which tests/published has."""
    published = json.loads((ROOT / f"tests/published/{file}.json").read_text())
    changes |= {"max_seq_len": published["max_position_embeddings"]}
    assert to_keel(published, "config.json") == load(job).config.model.model_copy(update=changes)


def test_gemma_3_270m_as_it_is_published():
    model = to_keel(json.loads((ROOT / "tests/published/gemma-3-270m.json").read_text()), "config.json")
    assert parameter_count(model) == 268_098_176
    assert [window_of(model, layer) for layer in range(7)] == [512] * 5 + [None, 512]
    assert (model.rope_theta, model.window_rope_theta, model.query_scale) == (1e6, 1e4, 256)


def test_qwen1_5_moe_as_it_is_published():
    """The fields of Qwen/Qwen1.5-MoE-A2.7B's config.json."""
    published = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    model = to_keel(published, "config.json")
    assert parameter_count(model) == 14_315_784_192
    assert (model.n_shared_experts, model.ffn_dim, model.expert_dim, model.attention_bias) == (4, 1408, None, True)
    assert unknown_fields(published, "config.json") == []
    sizes = {"num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size"}
    assert to_keel({name: published[name] for name in published.keys() - sizes}, "config.json") == model
    for field, value in (("decoder_sparse_step", 2), ("mlp_only_layers", [1]), ("use_sliding_window", True)):
        with pytest.raises(UserError, match=field):
            to_keel(published | {field: value}, "config.json")


def test_qwen3s_defaults_are_those_of_transformers():
    from transformers import Qwen3Config

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 32}
    model = to_keel({"model_type": "qwen3", "vocab_size": 96} | sizes, "config.json")
    theirs = Qwen3Config(vocab_size=96, **sizes)
    assert (model.head_dim, model.n_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (model.norm_eps, model.init_std) == (theirs.rms_norm_eps, theirs.initializer_range)
    assert model.rope_theta == theirs.rope_parameters["rope_theta"]


def test_types(tmp_path, exported):
    """float16 and mixtures go to the narrowest type that holds all of them; --dtype rounds."""
    for path in exported.glob("*.safetensors"):
        tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(tensors | {name: t.bfloat16() for name, t in tensors.items() if "norm" in name}, path)
    source = {name: tensor for path in exported.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {tensor.dtype for tensor in source.values()} == {torch.float16, torch.bfloat16}
    import_hf(exported, tmp_path / "exact", None)
    assert script.main([str(exported), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    exact, half = state_of(tmp_path / "exact"), state_of(tmp_path / "half")
    for name, tensor in source.items():
        key = f"model.{name.removeprefix('model.')}"
        assert torch.equal(exact[key], tensor.float())
        assert torch.equal(half[key], tensor.bfloat16())
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}


def test_older_configs(exported, tmp_path):
    """Before transformers 5, and before 4.43; fields that are not there have LlamaConfig's defaults."""
    path = exported / "config.json"
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    edit_config(
        exported, rope_parameters=..., dtype=..., rope_theta=7000, rope_scaling={"rope_type": "llama3"} | scaling
    )
    model = to_keel(json.loads(path.read_text()), path)
    assert model.rope_theta == 7000.0
    assert model.rope_scaling == RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=16)
    edit_config(exported, rope_scaling=..., rope_theta=..., rms_norm_eps=..., head_dim=..., num_key_value_heads=...)
    model = to_keel(json.loads(path.read_text()), path)
    assert (model.rope_theta, model.rope_scaling, model.norm_eps) == (10000.0, None, 1e-6)
    assert (model.head_dim, model.n_kv_heads) == (None, None)
    from transformers import LlamaConfig

    theirs = LlamaConfig()
    assert (theirs.rms_norm_eps, theirs.initializer_range, theirs.tie_word_embeddings) == (1e-6, 0.02, False)
    assert theirs.rope_parameters["rope_theta"] == 10000.0


sizes = st.integers(1, 64)
positive = st.floats(1e-8, 1e8)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Model,
        dim=sizes.map(lambda n: n * 8),
        n_layers=st.integers(1, 3),
        n_heads=st.just(4),
        n_kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=sizes.map(lambda n: n * 2),
        ffn_dim=sizes,
        vocab_size=st.integers(2, 64),
        rope_theta=positive,
        norm_eps=positive,
        init_std=positive,
        tie_embeddings=st.booleans(),
        qk_norm=st.sampled_from(["none", "head"]),
        rope_scaling=st.none()
        | st.builds(
            RopeScaling,
            factor=st.floats(1.0, 1e8),
            low_freq_factor=st.floats(1e-8, 1.0),
            high_freq_factor=st.floats(1.1, 1e8),
            original_seq_len=sizes,
        ),
        max_seq_len=st.integers(32, 1 << 20),
    )
)
def test_config_there_and_back(model):
    config = json.loads(json.dumps(to_hf(model, "float32", 32, 1, None)))
    assert to_keel(config, "config.json") == model
    with torch.device("meta"):
        names = {name: tuple(parameter.shape) for name, parameter in build_model(model).named_parameters()}
    assert {name.removeprefix("model."): shape for name, shape in tensor_shapes(model).items()} == names


def test_a_model_without_attention_has_no_keys_of_attention_to_export():
    """What a job says of attention is in vain there, and the class of its layers computes it all the same."""
    hybrid = TINY["qwen3_next"]
    model = hybrid.model_copy(update={"layers": ("delta",)})
    plain = model.model_copy(update={key: Model.model_fields[key].default for key in model.keys_in_vain})
    assert plain.qk_norm == "none"
    assert not_exportable(plain) == not_exportable(model) == ""
    assert computed(plain) == computed(model)
    back = to_keel(json.loads(json.dumps(to_hf(plain, "float32", 32, 1, None))), "config.json")
    assert computed(back) == computed(plain)


@pytest.mark.parametrize(("scale", "said"), [(24.0, ""), (24.5, "query_scale is 24.5, no whole number")])
def test_transformers_takes_no_fraction_as_gemmas_query_scale(scale, said):
    found = not_exportable(TINY["gemma3"].model_copy(update={"query_scale": scale}))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(("kinds", "window"), [([FULL, FULL], None), ([NEAR, NEAR], 9), (None, 9), (..., 9)])
def test_a_mistral_with_kinds_of_layers_is_read_as_transformers_does(kinds, window):
    """Mistral alone has the window in every layer; with layer_types, AutoConfig makes it a Ministral."""
    config = json.loads(json.dumps(to_hf(TINY["mistral"], "float32", 32, 1, None)))
    assert to_keel(config if kinds is ... else config | {"layer_types": kinds}, "config.json").window == window


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["olmo3", "gemma3"]), st.integers(1, 9), st.sampled_from([0, 2, 3, 4, 6, 9]))
def test_windows_there_and_back(name, n_layers, pattern):
    model = TINY[name].model_copy(update={"n_layers": n_layers, "window_pattern": pattern})
    back = to_keel(json.loads(json.dumps(to_hf(model, "float32", 32, 1, None))), "config.json")
    layers = range(n_layers)
    assert [window_of(back, layer) for layer in layers] == [window_of(model, layer) for layer in layers]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from([None, 2, 3, 4, 9]))
def test_layers_without_rotary_embedding_there_and_back(n_layers, every):
    model = TINY["smollm3"].model_copy(update={"n_layers": n_layers, "no_rope_every": every})
    back = to_keel(json.loads(json.dumps(to_hf(model, "float32", 32, 1, None))), "config.json")
    layers = range(n_layers)
    assert [is_rotated(back, layer) for layer in layers] == [is_rotated(model, layer) for layer in layers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "phi3"}, "model_type 'phi3'"),
        (SMOLLM3 | {"no_rope_layers": [0, 1]}, "no_rope_layers is no list in which every n-th layer is 0"),
        (SMOLLM3 | {"no_rope_layers": [0, 0]}, "no_rope_layers: no layer has a rotary embedding"),
        (
            SMOLLM3 | {"layer_types": [FULL, NEAR], "sliding_window": 8, "use_sliding_window": False},
            "layer_types = ['full_attention', 'sliding_attention'] is not supported; Keel's SmolLM3 has full attention",
        ),
        (MISTRAL | {"sliding_window": 8, "layer_types": [NEAR, FULL]}, "layers of two kinds, as Ministral has"),
        (OLMO3 | {"layer_types": [FULL, NEAR, NEAR]}, "layer_types is no list in which every n-th layer differs"),
        (OLMO3 | {"layer_types": ["chunked_attention"] * 2}, "layer_types: the kinds of layers must be among"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "do not train; take the original ones"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type = 'dynamic'"),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "longrope", "factor": 2}},
            "rope_scaling.rope_type = 'longrope'",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                    "mscale": 1.0,
                }
            },
            "rope_parameters.mscale = 1.0",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type = ['yarn']"),
        (DEEPSEEK_V3 | {"rope_parameters": YARN | {"mscale_all_dim": "1"}}, "rope_parameters.mscale_all_dim = '1'"),
        (
            DEEPSEEK_V3 | {"rope_parameters": YARN | {"mscale_all_dim": 1e308}},
            "rope_parameters.mscale_all_dim = 1e+308",
        ),
        (
            DEEPSEEK_V3 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "rope_parameters.mscale_all_dim = 1.0",
        ),
        ({"rope_parameters": YARN | {"mscale_all_dim": None, "rope_theta": 1.0}}, "rope_theta 1 with rope_scaling"),
        (
            {"rope_parameters": YARN | {"mscale_all_dim": None}, "original_max_position_embeddings": 16},
            "original_max_position_embeddings = 16 is not supported; rope_parameters has 8, and",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads: n_heads 4 is not divisible by n_kv_heads 3"),
        ({"head_dim": 15}, "head_dim: head_dim 15 is odd"),
        (
            QWEN3_NEXT | {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "linear_num_value_heads: value_heads 4 is not divisible by key_heads 3",
        ),
        (DEEPSEEK_V3 | {"rope_parameters": YARN | {"factor": -2.0}}, "factor: Input should be greater than"),
        (QWEN2_MOE | {"mlp_only_layers": 1}, "mlp_only_layers = 1 are not the leading layers"),
        (QWEN2_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is no whole number"),
        (QWEN2_MOE | {"moe_intermediate_size": 0}, "shared_expert_intermediate_size 5632 is no multiple of"),
        (QWEN2_MOE | {"num_hidden_layers": "2"}, "num_hidden_layers is no whole number"),
        (QWEN3_NEXT | {"layer_types": [["linear_attention"], FULL]}, "layer_types: a list of 2 kinds"),
        (QWEN3_NEXT | {"full_attention_interval": 0}, "full_attention_interval 0 is below 1"),
        (QWEN3_NEXT | {"num_hidden_layers": 10**15}, "num_hidden_layers 1000000000000000 is not from 1 to"),
        (QWEN3_NEXT | MANY_LAYERS, "num_hidden_layers 10000 is not from 1 to"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None is not supported"),
        ({"max_position_embeddings": -5}, "max_position_embeddings = -5 is not supported"),
        ({"hidden_size": ...}, "hidden_size: Field required"),
        ({"hidden_size": "32"}, "hidden_size: Input should be a valid integer"),
        ({"vocab_size": 97}, "model.embed_tokens.weight: [96, 32], expected: [97, 32]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight: missing, expected: [32]"),
        ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight: [32], expected: no such tensor"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight"),
    ],
)
def test_what_is_refused(exported, tmp_path, capsys, changes, message):
    edit_config(exported, **changes)
    assert script.main([str(exported), str(tmp_path / "out")]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert error.startswith(f"error: {exported}")
    assert "Traceback" not in error
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "hf"}


def only_bin(folder):
    (folder / "pytorch_model.bin").write_bytes(b"")
    for path in folder.glob("model*"):
        path.unlink()


def nothing(folder):
    for path in folder.glob("model*"):
        path.unlink()


def one_file_less(folder):
    next(folder.glob("*.safetensors")).unlink()


def cut_off(folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def leave_the_folder(folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}))


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def list_for_config(folder):
    (folder / "config.json").write_text("[]")


def integers(folder):
    path = next(folder.glob("*.safetensors"))
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (only_bin, "has its weights only in pytorch_model.bin, a pickle"),
        (nothing, "has no safetensors"),
        (one_file_less, "can't be read"),
        (cut_off, "can't be read"),
        (leave_the_folder, "names '../secret.safetensors', outside of the folder"),
        (no_config, "is not a Hugging Face model folder: it has no config.json"),
        (broken_config, "config.json can't be read"),
        (list_for_config, "config.json holds a list"),
        (integers, "is of type I8"),
    ],
)
def test_folders_that_are_refused(exported, tmp_path, capsys, spoil, message):
    spoil(exported)
    assert script.main([str(exported), str(tmp_path / "out")]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "hf"}


def test_superfluous_tensors_that_follow_from_the_rest(tmp_path):
    """Old exports hold the rotary frequencies, and some the head of a tied model."""
    export_hf(save(tmp_path / "step-00000001", make_model(TINY["tied"])), tmp_path / "hf", NO_TOKENIZER)
    path = tmp_path / "hf/model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path)
    import_hf(tmp_path / "hf", tmp_path / "back", None)
    assert state_of(tmp_path / "back").keys() == state_of(tmp_path / "step-00000001").keys() - {
        name for name in state_of(tmp_path / "step-00000001") if name.startswith("optimizer.")
    }


def test_an_existing_output_is_left_alone(exported, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists; name another folder"):
        import_hf(exported, tmp_path / "out", None)


def test_a_full_disk_leaves_nothing(exported, tmp_path, monkeypatch):
    def full(file, data):
        file.error = OSError(28, "No space left on device")
        raise file.error

    monkeypatch.setattr("checkpoint.storage.HashedFile.write", full)
    with pytest.raises(UserError, match=r"out could not be written: .*No space left on device"):
        import_hf(exported, tmp_path / "out", None)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "hf"}


def away(path, elsewhere):
    """Move a file to another folder, and leave a link to it."""
    elsewhere.mkdir(parents=True, exist_ok=True)
    target = shutil.move(path, elsewhere / path.name)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "*.safetensors", "tokenizer.json"],
)
def test_a_link_out_of_the_folder_is_refused_by_name(exported, tmp_path, name, capsys):
    """A stranger's folder could bring files of this machine into what one publishes."""
    if name == "tokenizer.json":
        (exported / name).write_text("{}")
    name = sorted(exported.glob(name))[-1].name
    away(exported / name, tmp_path / "private")
    assert script.main([str(exported), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert f"{exported / name} is a link to {tmp_path / 'private' / name}, outside of the folder" in told
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_to_the_blobs_of_a_hub_cache_are_read(exported, tmp_path):
    away(exported / "config.json", exported / "other")
    import_hf(exported, tmp_path / "one", None)
    cache = tmp_path / "models--org--name"
    (cache / "snapshots").mkdir(parents=True)
    snapshot = exported.rename(cache / "snapshots" / "0a1b2c")
    for path in [*snapshot.glob("*.safetensors")]:
        away(path, cache / "blobs")
    import_hf(snapshot, tmp_path / "two", None)
    assert state_of(tmp_path / "one").keys() == state_of(tmp_path / "two").keys()
    blob = next((cache / "blobs").iterdir())
    away(blob, tmp_path / "private")  # a blob is a file, not a link
    with pytest.raises(UserError, match=f"{blob.name} is a link to {tmp_path}/private/{blob.name}, outside"):
        import_hf(snapshot, tmp_path / "three", None)
