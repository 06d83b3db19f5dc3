"""Jobs of Hugging Face's models: what is read of a config.json, without torch, and each mistake's one message."""

import json
from contextlib import suppress

import pytest

from configs.checks.idle import without_effect
from configs.errors import ConfigError
from configs.load import load
from configs.reading import hf_config
from configs.reading.hf_config import causal_families, unknown_fields
from configs.run_change import function_diff, run_key_diff
from tests.hf_families import NEEDS_TRANSFORMERS, words, write_config

pytestmark = NEEDS_TRANSFORMERS


@pytest.fixture
def folder(tmp_path):
    return write_config(tmp_path / "qwen3", "qwen3")


def message(*words):
    with pytest.raises(ConfigError) as caught:
        load("parity.toml", words)
    return str(caught.value)


def test_the_job_holds_the_content_of_the_file(folder):
    loaded = load("parity.toml", words(folder, "--model.hf_overrides.num_hidden_layers", "3"))
    model = loaded.config.model
    assert (model.model_type, model.n_layers, model.dim, model.n_heads, model.vocab_size) == ("qwen3", 3, 64, 4, 160)
    assert (model.n_kv_heads, model.head_dim, model.n_experts) == (2, 16, None)
    assert model.hf is None
    assert model.hf_overrides == {}
    assert loaded.origins["model.hf_config"] == "--model.hf"


def test_the_resolved_job_needs_no_file(folder, tmp_path):
    loaded = load("parity.toml", words(folder))
    job = tmp_path / "config.toml"
    job.write_text(loaded.to_toml())
    (folder / "config.json").unlink()
    again = load(str(job))
    assert again.config == loaded.config
    assert hash(again.config.model) == hash(loaded.config.model)


def test_a_job_file_may_name_the_file_itself(folder, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        f'base = "parity.toml"\n[model]\narchitecture = "hf"\nhf = "{folder}/config.json"\n'
        '[model.hf_overrides]\nsliding_window = "none"\nrope_parameters = {rope_type = "default", rope_theta = 5e5}\n'
    )
    fields = load(str(job)).config.model.fields
    assert fields["sliding_window"] is None
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


def test_another_architecture_replaces_the_table_of_the_base(folder):
    assert load("debug.toml", words(folder, "--model.hf_overrides.vocab_size", "4096")).config.model.n_layers == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--model.dim", "64"], '--model.dim: model.dim is no key of architecture "hf"; the shape of the model comes'),
        (["--mesh.pp", "4"], "--mesh.pp: pp 4 = 4 stages are more than n_layers 2"),
        (["--mesh.dp_shard", "2", "--mesh.ep", "4"], "--mesh.ep: ep 4 does not divide dp_shard 2 x cp 1 = 2 (2 / 4 ="),
        (
            ["--mesh.ep", "4", "--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1"],
            "--mesh.ep: ep 4 does not divide dp_replicate 2 x cp 1 = 2 (2 / 4 = 0.50), the ranks that it distributes",
        ),
        (["--attention.backend", "flash2"], "--attention.backend: the kernel is chosen in Keel's own attention"),
        (["--float8.recipe", "rowwise", "--float8.emulate", "true"], "--float8.recipe: float8 matmuls replace"),
        (["--mesh.tp", "4"], "--mesh.tp: tp 4 does not divide num_key_value_heads 2 (2 / 4 = 0.50); change one of"),
        (
            ["--model.hf_config", "text"],
            "--model.hf: hf and hf_config both say what the model is; leave one",
        ),
        (["--model.hf_overrides.hidden_size", "none"], "--model.hf: the config.json lacks hidden_size"),
        (
            ["--model.hf_overrides.hidden_size", "none", "--model.hf_overrides.n_embd", "wide"],
            "has 'wide' as n_embd, a whole number of 1 or more; set model.hf_overrides.n_embd",
        ),
        (
            ["--model.hf_overrides.model_type", "qwen33"],
            'no causal language model of model_type "qwen33"; did',
        ),
        (
            ["--model.hf_overrides.num_hiden_layers", "3"],
            "--model.hf_overrides.num_hiden_layers: the configuration of qwen3 has no field num_hiden_layers; did you",
        ),
        (["--model.hf_overrides", "3"], "--model.hf_overrides: model.hf_overrides must be an object, got 3"),
        (["--model.hf_overrides.quantization_config", "{bits = 4}"], "the weights are quantized"),
    ],
)
def test_a_mistake_is_one_message(folder, more, expected):
    found = message(*words(folder, *more))
    assert expected in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list instead of an object"),
        ("{}", "has no model_type"),
        ('{"model_type": "qwen3", "auto_map": {}}', "Keel runs code from installed packages only"),
        (
            '{"model_type": "of_next_year", "transformers_version": "9.1.0", "hidden_size": 8, "vocab_size": 8, '
            '"num_hidden_layers": 1, "num_attention_heads": 1}',
            "transformers 9.1.0 wrote this file, so a newer version may have it",
        ),
    ],
)
def test_a_file_that_is_no_model_is_one_message(tmp_path, content, expected):
    (tmp_path / "config.json").write_text(content)
    found = message(*words(tmp_path))
    assert expected in found
    assert found.startswith("--model.hf: ")
    assert "\n" not in found


def test_a_missing_folder_is_named_with_what_else_is_wrong(tmp_path):
    assert message(*words(tmp_path / "none"), "--training.steps", "-1") == (
        "--model.hf: no such file or folder: "
        f"{tmp_path / 'none'}; name a folder with the config.json of a model of Hugging Face, or that file\n"
        "--training.steps: training.steps must be an integer > 0, got -1"
    )
    assert f"no config.json in {tmp_path}" in message(*words(tmp_path))
    assert "needs hf, a folder" in message("--model.architecture", "hf")


def test_keys_of_the_door_do_not_belong_to_a_native_model():
    assert message("--model.hf", "x") == (
        '--model.hf: model.hf is no key of architecture "llama"; leave it out, or set architecture = "hf"'
    )


def test_without_transformers_the_message_names_the_package(folder, monkeypatch):
    monkeypatch.setattr(hf_config, "causal_families", lambda: None)
    assert "the package transformers is not installed" in message(*words(folder))


def test_a_transformers_that_is_too_old_is_named(folder, monkeypatch):
    monkeypatch.setattr(hf_config, "version", lambda package: "5.0.0")
    assert "the installed transformers, 5.0.0, is too old to train its models: pip install" in message(*words(folder))


def test_the_families_are_those_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = {kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}
    assert causal_families().keys() == expected


def test_fields_that_a_family_does_not_have_are_named(folder):
    """transformers keeps what a config.json has beyond the family's configuration, and reads nothing of it."""
    fields = json.loads((folder / "config.json").read_text())
    further = {"torch_dtype": "bfloat16", "rope_scaling": None, "sliding_windows": 4, "temperature_of": 2.0}
    (folder / "config.json").write_text(json.dumps(fields | further))
    assert list(without_effect(load("parity.toml", words(folder)).config)) == [
        "fields of the config.json that the configuration of qwen3 does not have do nothing: sliding_windows, "
        "temperature_of"
    ]


@pytest.mark.slow
def test_a_familys_own_fields_are_known():
    import transformers

    own_fields = {}
    for kind in causal_families():
        with suppress(Exception):  # some need what only a published file has
            own_fields[kind] = transformers.AutoConfig.for_model(kind).to_dict()
    assert len(own_fields) > 100
    for kind, fields in own_fields.items():
        assert not unknown_fields(fields | {"model_type": kind, "experts_implementation": "eager"}), kind


@pytest.mark.parametrize("more", [{}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_a_mistral_with_kinds_of_layers_is_the_family_that_transformers_takes_it_for(tmp_path, more):
    from transformers import AutoConfig

    folder = write_config(tmp_path / "mistral", "llama", model_type="mistral", sliding_window=8, **more)
    model = load("parity.toml", words(folder)).config.model
    assert model.model_type == AutoConfig.from_pretrained(folder).model_type == ("ministral" if more else "mistral")


def test_a_changed_file_is_a_changed_run_key(folder):
    before = load("parity.toml", words(folder)).config.model_dump()
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-3, "transformers_version": "6.0"}))
    after = load("parity.toml", words(folder)).config.model_dump()
    assert run_key_diff(before, after) == [
        "model.hf_config.rms_norm_eps: (not set) -> 0.001",
        'model.hf_config.transformers_version: (not set) -> "6.0"',
    ]
    assert function_diff(before, after) == ["model.hf_config.rms_norm_eps: (not set) -> 0.001"]
