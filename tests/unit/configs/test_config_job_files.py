"""The job files in configs/: valid, of the published sizes, and their comments true."""

import json
import re
from math import prod
from pathlib import Path

import pytest

from configs.layout import active_parameter_count, mesh_sizes, parameter_count, smallest_world_size
from configs.load import JOB_FILES, load
from scripts import config_schema
from scripts.config_schema import KEYS_FILE, SCHEMA_FILE, keys_text, schema_text
from trainer.planning.skeleton import skeleton

ROOT = Path(__file__).resolve().parents[3]

# Sizes of the published checkpoints, as their safetensors indices count them.
PUBLISHED = {
    "llama_1b": 1_235_814_400,
    "llama_3b": 3_212_749_824,
    "llama_7b": 6_738_415_616,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_0.6b": 596_049_920,  # without the copy of the tied embedding that its file holds
    "qwen3_1.7b": 1_720_574_976,  # the same
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "deepseek_moe_16b": 16_375_728_128,
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mistral_7b": 7_241_732_096,
    "olmo2_1b": 1_484_916_736,
    "olmo3_7b": 7_298_011_136,
    "olmo3_7b_stages": 7_298_011_136,
    "smollm3_3b": 3_075_098_624,
    "gemma3_1b": 999_885_952,
    "deepseek_v3": 671_026_404_352,  # without the layer that predicts a further token, and the biases of the routers
    "qwen3_next_80b_a3b": 79_674_391_296,  # the same, as transformers' class counts them
}
ACTIVE = {
    "mixtral_8x7b": 12.9,
    "deepseek_moe_16b": 2.8,
    "qwen3_30b_a3b": 3.35,
    "qwen3_235b_a22b": 22.2,
    "deepseek_v3": 37.55,
}  # billions, as their papers say; DeepSeek-V3's says 37, with one digit less
HARDWARE = {"debug": 1, "llama_1b": 1, "llama_3b": 8, "llama_7b": 8, "llama_8b": 8, "llama_70b": 256, "llama_405b": 512}
HARDWARE |= {"my_text": 1, "moe_debug": 1, "mixtral_8x7b": 64, "deepseek_moe_16b": 32, "qwen3_0.6b": 1}
HARDWARE |= {"qwen2.5_7b": 8, "qwen3_30b_a3b": 16, "qwen3_235b_a22b": 256, "mistral_7b": 8, "smollm3_3b": 8}
HARDWARE |= {"olmo2_1b": 1, "olmo3_7b": 8, "olmo3_7b_stages": 8, "gemma3_1b": 1, "deepseek_v3": 2048}
HARDWARE |= {"qwen3_next_80b_a3b": 64}
HARDWARE |= {"qwen3_1.7b": 1, "qwen3_4b": 8, "qwen3_8b": 8, "qwen3_14b": 16, "qwen3_32b": 64}


@pytest.mark.parametrize("file", sorted(JOB_FILES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_job_file_is_valid(file):
    config = load(str(file)).config
    load(str(file), world_size=smallest_world_size(config))
    assert config.job.name == file.stem
    assert file.read_text().startswith("#:schema ./schema.json\n")


@pytest.mark.parametrize(("name", "ranks"), HARDWARE.items())
def test_every_job_runs_on_the_hardware_it_names(name, ranks):
    assert mesh_sizes(load(name, world_size=ranks).config, ranks).world_size == ranks


@pytest.mark.parametrize(("ranks", "words"), [(1, []), (2, []), (2, ["--mesh.tp=2"]), (4, ["--mesh.tp=2"])])
def test_the_debug_job_runs_on_small_meshes(ranks, words):
    assert mesh_sizes(load("debug", words, ranks).config, ranks).world_size == ranks


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_sizes_are_the_published_ones(name, count):
    assert parameter_count(load(name).config.model) == count


@pytest.mark.parametrize("name", HARDWARE)
def test_the_formula_counts_what_the_shapes_hold(name):
    model = load(name).config.model
    shapes = skeleton(model).shapes.values()
    assert parameter_count(model) == sum(map(prod, shapes))


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_parameters_are_the_published_ones(name, billions):
    assert active_parameter_count(load(name).config.model) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("name", HARDWARE)
def test_comments_state_parameters_batch_and_hardware(name):
    config = load(name).config
    comment = re.match(r"(#.*\n|\n)+", (JOB_FILES / f"{name}.toml").read_text())[0]
    assert f"{parameter_count(config.model):,}" in comment
    assert f"{config.training.global_batch_size * config.training.seq_len:,} tokens" in comment
    assert "Hardware:" in comment


def test_the_schema_for_editors_is_current():
    # As JSON: pydantic writes 1.0 or 1, by version.
    current, kept = (json.loads(text) for text in (schema_text(), SCHEMA_FILE.read_text(encoding="utf-8")))
    assert kept == current, "run python scripts/config_schema.py"


def test_the_page_of_all_keys_is_current():
    assert _without_zero(KEYS_FILE.read_text()) == _without_zero(keys_text()), "run python scripts/config_schema.py"
    assert "| `lr` | number > 0 | required | Peak learning rate. |" in keys_text()


def _without_zero(text):
    return text.replace(".0`", "`")  # as above


def test_the_script_writes_both_files_and_nothing_when_asked_for_help(tmp_path, monkeypatch, capsys):
    for name in ("SCHEMA_FILE", "KEYS_FILE"):
        monkeypatch.setattr(config_schema, name, tmp_path / name)
    with pytest.raises(SystemExit):
        config_schema.main(["--help"])
    with pytest.raises(SystemExit):
        config_schema.main(["extra"])
    assert not any(tmp_path.iterdir())
    assert config_schema.main([]) == 0
    assert (tmp_path / "KEYS_FILE").read_text() == keys_text()
    monkeypatch.setattr(config_schema, "SCHEMA_FILE", tmp_path)
    assert config_schema.main([]) == 1
    assert f"{tmp_path} can't be written: Is a directory" in capsys.readouterr().err
