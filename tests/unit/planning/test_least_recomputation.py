"""activation_checkpoint.memory_limit_gib: the choice fits, nothing that repeats less does, and it is said."""

import os
import re
import subprocess
import sys

import pytest
import torch

from configs.command_line import answer, parse_command_line
from configs.errors import ConfigError
from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import ActivationCheckpoint, is_run_key
from models import build_model
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from scripts import plan
from tests.conftest import ROOT
from tests.end_to_end.launch import TINY, curve, launch_here
from trainer.planning.by_memory import SHARE_OF_A_CARD, choose, chosen, planned_choice
from trainer.planning.memory import estimate_memory

GIB = 2**30
SOURCE = ("--data.sources", '[{name = "random", kind = "synthetic"}]')
LIMIT = "--activation_checkpoint.memory_limit_gib"
TINY_LIMIT = "0.00068"  # of the tiny job, which takes 0.00074 GiB without recomputation and 0.00063 with full


def job(name, ranks, *words):
    return load(name, [*words, *SOURCE], ranks).config


def needed(config, ranks, table):
    changed = config.model_copy(update={"activation_checkpoint": table})
    return estimate_memory(changed, mesh_sizes(config, ranks), "cuda").device


WAYS = (
    ActivationCheckpoint(mode="selective"),
    ActivationCheckpoint(mode="selective", save_every_nth_matmul=2),
    ActivationCheckpoint(mode="selective", save_ops=["*._scaled_dot_product_*attention*"]),
    ActivationCheckpoint(mode="full"),
)
LIMITS = (15.0, 15.6, 18.0, 22.0, 24.3, 26.0, 31.5, 33.0, 36.9, 40.0)


@pytest.fixture(scope="module")
def six_layers():
    return job("llama_8b.toml", 8, "--model.n_layers", "6", "--training.micro_batch_size", "4")


@pytest.mark.parametrize("gib", LIMITS)
def test_the_first_way_that_fits_is_taken_on_as_few_layers_as_fit(six_layers, gib):
    first = [way.model_copy(update={"layers": f"0-{n - 1}"}) for way in WAYS for n in range(1, 7)]
    tables = [ActivationCheckpoint(), *first]
    memory = [needed(six_layers, 8, table) for table in tables]
    fitting = [n for n, way in enumerate(("none", *WAYS)) if memory[6 * n] <= gib * GIB]
    if not fitting:
        with pytest.raises(ConfigError, match="even with full recomputation"):
            choose(six_layers, mesh_sizes(six_layers, 8), "cuda", gib * GIB)
        return
    choice = choose(six_layers, mesh_sizes(six_layers, 8), "cuda", gib * GIB)
    of_the_way = range(6 * fitting[0] - 5, 6 * fitting[0] + 1) if fitting[0] else [0]
    fewest = next(place for place in of_the_way if memory[place] <= gib * GIB)
    table = chosen(six_layers, choice).activation_checkpoint
    expected = tables[fewest]
    assert table == (expected.model_copy(update={"layers": None}) if expected.layers == "0-5" else expected)
    assert choice.needed == memory[fewest]


def test_every_kind_of_answer_is_among_those_limits(six_layers):
    jobs = [choose(six_layers, mesh_sizes(six_layers, 8), "cuda", gib * GIB).job for gib in LIMITS[1:]]
    tables = [job.activation_checkpoint for job in jobs]
    assert len({(t.mode, bool(t.save_ops), t.save_every_nth_matmul) for t in tables}) == 5
    assert {t.layers is None for t in tables} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        pytest.param("mixtral_8x7b.toml", 64, ("--compile.enable", "false"), marks=pytest.mark.slow),
        pytest.param("deepseek_moe_16b.toml", 32, (), marks=pytest.mark.slow),
        ("qwen3_next_80b_a3b.toml", 64, ()),
        ("gemma3_1b.toml", 8, ()),
        ("llama_8b.toml", 8, ("--mesh.pp", "4", "--pipeline.split", "[9, 8, 8, 7]")),
        ("llama_8b.toml", 8, ("--mesh.pp", "4", "--pipeline.schedule", "interleaved_1f1b")),
        ("llama_8b.toml", 8, ("--mesh.pp", "2", "--pipeline.schedule", "zero_bubble_v", "--compile.enable", "false")),
    ],
)
def test_a_choice_can_be_built_on_any_model_and_mesh(name, ranks, words):
    """Halfway between no recomputation and a full one."""
    config = job(name, ranks, *words, "--activation_checkpoint.memory_limit_gib", "1")
    sizes = mesh_sizes(config, ranks)
    ends = [needed(config, ranks, ActivationCheckpoint(mode=mode)) for mode in ("none", "full")]
    choice = choose(config, sizes, "cuda", sum(ends) / 2)
    assert estimate_memory(chosen(config, choice), sizes, "cuda").device == choice.needed <= sum(ends) / 2
    if config.pipeline.schedule == "zero_bubble_v":
        assert choice.job.activation_checkpoint.mode == "full"
    with torch.device("meta"):
        apply_activation_checkpoint(build_model(config.model), choice.job.activation_checkpoint)


@pytest.mark.slow
def test_each_stage_of_a_pipeline_recomputes_as_many_layers():
    config = job("llama_8b.toml", 8, "--mesh.pp", "4", "--pipeline.split", "[8, 8, 8, 8]")
    ends = [needed(config, 8, ActivationCheckpoint(mode=mode)) for mode in ("none", "full")]
    layers = choose(config, mesh_sizes(config, 8), "cuda", sum(ends) / 2).job.activation_checkpoint.layers
    counts = [int(last) - int(first) + 1 for first, last in re.findall(r"(\d+)-(\d+)", layers)]
    assert len(counts) == 4
    assert len(set(counts)) == 1


def test_the_key_overrides_the_mode(tmp_path):
    table = job("llama_7b.toml", 8, LIMIT, "60").activation_checkpoint
    assert (table.mode, table.memory_limit_gib) == ("none", 60)
    assert job("llama_7b.toml", 8, LIMIT, "0").activation_checkpoint.mode == "selective"
    file = tmp_path / "job.toml"
    file.write_text(f'base = "{TINY}"\n[activation_checkpoint]\nmemory_limit_gib = "device"\nmode = "full"\n')
    (warning,) = load(str(file), ("--job.device", "auto"), 1).warnings
    assert f'{file}:4: activation_checkpoint.mode does nothing with memory_limit_gib = "device"' in warning
    assert not is_run_key("activation_checkpoint.memory_limit_gib")


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_has_no_card(device, tmp_path, capsys):
    if device == "cpu":
        (warning,) = load(str(TINY), (LIMIT, "device"), 1).warnings
        assert '"device" does nothing with job.device = "cpu"' in warning
        return
    assert launch_here(tmp_path, "--job.device", device, LIMIT, "device") == 78
    assert "is about a GPU's memory, and this run is on a CPU; set a number of GiB" in capsys.readouterr().err


@pytest.mark.slow
def test_a_card_gives_nine_tenths_of_its_memory():
    config = job("llama_7b.toml", 8, LIMIT, "device")
    assert planned_choice(config, 8, 80 * GIB).limit == int(72 * GIB) == int(SHARE_OF_A_CARD * 80 * GIB)


@pytest.mark.slow
def test_a_run_says_its_choice_trains_the_same_and_may_change_it(tmp_path, capsys):
    plain, limited = tmp_path / "plain", tmp_path / "limited"
    assert launch_here(plain) == 0
    capsys.readouterr()
    assert launch_here(limited, LIMIT, TINY_LIMIT, "--training.steps", "10") == 0
    said = capsys.readouterr().out
    assert f"memory_limit_gib = {TINY_LIMIT} chooses mode = " in " ".join(said.split())
    assert f"memory_limit_gib = {TINY_LIMIT}" in (limited / "run" / "config.toml").read_text()
    assert launch_here(limited, LIMIT, "0.00072") == 0  # less is recomputed from step 10 on
    again = capsys.readouterr().out
    choices = [re.search(r"chooses ([^:]*):", " ".join(text.split()))[1] for text in (said, again)]
    assert choices[0] != choices[1]
    assert curve(limited / "run") == curve(plain / "run")


def test_a_limit_that_cannot_be_kept_ends_in_one_message(tmp_path, capsys):
    assert launch_here(tmp_path, LIMIT, "0.0001") == 78
    said = " ".join(capsys.readouterr().err.split())
    assert "allows 105 KiB for a rank's tensors, and even with full recomputation they take about 663 KiB" in said
    assert "Traceback" not in said


def test_a_plan_says_the_choice(capsys):
    words = ("--config", "llama_7b.toml", "--ranks", "8", *SOURCE, LIMIT)
    assert plan.main((*words, "device", "--memory-gib", "80")) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r'"device" chooses mode = "selective", layers = "0-\d+": about (7\d.\d GiB) of 72.0 GiB', said)
    assert found, said
    assert f"about {found[1]} allocated" in said  # the plan is that of the choice
    assert plan.main((*words, "device")) == 78
    assert "say with --memory-gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "environment", "expected"),
    [
        ("60", {"WORLD_SIZE": "8"}, 'memory_limit_gib = 60.0 chooses mode = "selective"'),
        ("60", {}, "memory_limit_gib = 60.0 chooses what is recomputed by the number of ranks"),
        ("device", {}, "chooses what is recomputed by the GPU's memory when the run starts"),
    ],
)
def test_validate_says_the_choice(limit, environment, expected, capsys):
    command = parse_command_line(["--config", "llama_7b.toml", "--validate", LIMIT, limit, *SOURCE])
    assert answer(command, environment, lambda config, ranks, others: str(planned_choice(config, ranks, None, others)))
    assert expected in capsys.readouterr().out


@pytest.mark.slow
def test_train_py_says_it_with_torch_only_where_the_key_is_set():
    program = """
import sys, train
sys.argv[1:] = sys.argv[1:-1] + (["--activation_checkpoint.memory_limit_gib", "60"] if sys.argv[-1] == "set" else [])
assert train.main() == 0
print("torch" in sys.modules)
"""
    for key in ("set", "unset"):
        words = ("--config", "llama_7b.toml", "--validate", *SOURCE, key)
        environment = os.environ | {"WORLD_SIZE": "8"}
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=environment,
        )
        assert done.stdout.endswith(f"{key == 'set'}\n"), done.stdout + done.stderr
        assert ("60.0 chooses mode" in done.stdout) == (key == "set")
