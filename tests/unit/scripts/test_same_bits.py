"""Two configs that differ in one thing start from the same weights and read the same samples, bit for bit."""

from contextlib import closing
from itertools import islice, zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from configs.load import load
from models import build_model
from parallelisms.init import materialize
from scripts.comparison.arms import Pairing, arms_of, differences, pairing, require_same_scoring
from tests.end_to_end.launch import TINY
from tests.hf_families import NEEDS_TRANSFORMERS, write_config
from trainer.data.fork import forked_position
from trainer.data.loader import build_loader
from trainer.opening import open_loader

DOUBLE = ("--training.dtype", "float64", "--training.compute_dtype", "float64", "--training.reduce_dtype", "float64")
SAME_WEIGHTS = [
    ("--optimizer.lr", "3e-2"),
    ("--optimizer.weight_decay", "0.3"),
    ("--optimizer.groups", '[{pattern = "*norm*", lr_scale = 0.5}]'),
    ("--lr_schedule.warmup_steps", "5"),
    ("--training.global_batch_size", "16"),
    ("--training.seq_len", "8"),
    ("--training.z_loss_weight", "1e-4"),
    ("--training.compute_dtype", "bfloat16"),
    ("--model.norm_eps", "1e-6"),
    ("--model.rope_theta", "5e5"),
    ("--data.sources", '[{name = "other", kind = "synthetic"}]'),
    ("--compile.enable", "true"),
]
OTHER_MODELS = [
    (("--model.n_layers", "4"), {}),
    (("--model.tie_embeddings", "true"), {}),
    (("--model.ffn_dim", "96"), {"gate_proj", "up_proj", "down_proj"}),
    (("--model.n_kv_heads", "4"), {"k_proj", "v_proj"}),
    (("--model.vocab_size", "300"), {"embed_tokens", "lm_head"}),
    (("--model.head_dim", "16"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
    (("--model.n_experts", "4"), {}),
    (("--model.init_std", "0.1"), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
     | {"embed_tokens", "lm_head"}),
    (DOUBLE, None),
]  # fmt: skip


def job_of(*words):
    return load("tests/end_to_end/tiny.toml", words, 1)


def config_of(*words):
    return job_of(*words).config


def weights(config):
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    materialize(model, torch.device("cpu"), config.training.seed)
    return dict(model.named_parameters())


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def samples(config, n=48):
    """The first samples of a run, by number: tokens and targets."""
    with closing(build_loader(config, 0, 1, 0)) as loader:
        batches = [batch for step in islice(loader, n // config.training.global_batch_size) for batch in step]
    rows = {}
    for batch in batches:
        rows |= {number: (batch.tokens[i], batch.targets[i]) for i, number in enumerate(batch.samples)}
    return [tensor for number in range(n) for tensor in rows[number]]


@pytest.mark.parametrize("words", SAME_WEIGHTS, ids=lambda words: words[0])
def test_what_does_not_shape_the_model_leaves_its_initial_weights(words):
    before, after = config_of(), config_of(*words)
    assert all(map(equal, weights(before).values(), weights(after).values()))
    shared = pairing(job_of(), job_of(*words))
    assert shared.same_weights == shared.parameters == len(weights(before))


@pytest.mark.parametrize(("words", "changed"), OTHER_MODELS, ids=lambda value: value[0] if type(value) is tuple else "")
def test_another_model_shares_the_weights_of_the_same_shape(words, changed):
    before, after = config_of(), config_of(*words)
    ours, theirs = weights(before), weights(after)
    same = {name for name in ours.keys() & theirs.keys() if equal(ours[name], theirs[name])}
    if changed is not None:
        differing = {name.split(".")[-2] for name in (ours.keys() & theirs.keys()) - same}
        assert differing == set(changed)
    shared = pairing(job_of(), job_of(*words))
    assert (shared.same_weights, shared.parameters) == (len(same), len(ours.keys() | theirs.keys()))
    assert len(same) > 0 or changed is None
    assert f"the same bits in {len(same)} of" in str(shared) or shared.same_weights == shared.parameters


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("field", "value", "same"),
    [("rope_theta", "5e5", 21), ("intermediate_size", "64", 15), ("initializer_range", "0.1", 5)],
)
def test_models_of_transformers_share_the_weights_that_their_families_draw_alike(tmp_path, field, value, same):
    model = ("--model.architecture", "hf", "--model.hf", str(write_config(tmp_path / "llama", "llama")))
    other = job_of(*model, f"--model.hf_overrides.{field}", value)
    ours, theirs = weights(job_of(*model).config), weights(other.config)
    assert sum(map(equal, ours.values(), theirs.values())) == same
    assert pairing(job_of(*model), other) == Pairing(same, 21, 0, None, None)


@pytest.mark.parametrize(
    "words",
    [
        ("--model.dim", "64"),
        ("--model.n_layers", "1"),
        ("--optimizer.lr", "1"),
        ("--training.micro_batch_size", "4"),
        ("--training.global_batch_size", "24"),
        ("--training.steps", "5"),
        ("--data.document_mask", "true"),
        ("--validation.sources", '[{name = "noise", kind = "synthetic"}]', "--validation.interval", "1"),
    ],
    ids=lambda words: words[0],
)
def test_the_samples_do_not_depend_on_what_else_differs(words):
    before, after = config_of(), config_of(*words)
    assert all(map(torch.equal, samples(before), samples(after)))
    shared = pairing(job_of(), job_of(*words))
    is_other = "document_mask" in words[0]  # the same tokens, but with other positions
    assert shared.other_samples_from == (0 if is_other else None)
    assert shared.other_batch_from == (1 if is_other or "global_batch" in words[0] else None)


def test_a_source_keeps_its_order_beside_another():
    own = '{name = "noise", kind = "synthetic"}'
    alone = samples(config_of())
    beside = job_of("--data.sources", f'[{own}, {{name = "other", kind = "synthetic"}}]')
    mixed = {bytes(tensor.numpy().tobytes()) for tensor in samples(beside.config, 96)}
    found = [tensor.numpy().tobytes() in mixed for tensor in alone]
    half = len(found) // 2
    assert found[:half] == [True] * half  # its first samples come, with samples of the other in between
    assert pairing(job_of(), beside).other_samples_from == 0


def test_other_seeds_share_nothing_but_the_validation():
    sources = [f'{{name = "{name}", kind = "synthetic", weight = {weight}}}' for name, weight in (("a", 1), ("b", 2.7))]
    validation = ("--validation.sources", f"[{', '.join(sources)}]", "--validation.interval", "1")
    jobs = [job_of("--training.seed", str(seed), *validation) for seed in (0, 1)]
    configs = [job.config for job in jobs]
    assert not any(map(torch.equal, samples(configs[0]), samples(configs[1])))
    assert not equal(*(weights(config)["lm_head.weight"] for config in configs))
    assert pairing(*jobs) == Pairing(0, len(weights(configs[0])), 0, 1, 0)
    validated = []
    for config in configs:
        with closing(build_loader(config, 0, 1, 0, validation=True)) as loader:
            validated.append(np.concatenate([batch.tokens.numpy() for [batch] in loader]))
    assert np.array_equal(*validated)


STAGES = """
[[stages]]
at_tokens = 896
training.seq_len = 32
training.global_batch_size = 4
optimizer.lr = 5e-3
[[stages]]
at_tokens = 1664
training.seq_len = 24
training.global_batch_size = 8
lr_schedule = {name = "linear", total_steps = 7}
"""
"""After 7 and 13 steps of a batch of 8: after 56 and 80 samples."""
HALF = ("--training.global_batch_size", "4")


def job_with(tmp_path, stages, *words):
    file = tmp_path / "job.toml"
    file.write_text(f'base = "{TINY}"\n{stages}')
    return load(str(file), words, 1)


@pytest.mark.parametrize(
    ("old", "new", "words", "differs", "shared"),
    [
        ("", "", (), [], "the same in every step"),
        ("= 5e-3", "= 1e-3", (), ["from step 8 on: optimizer.lr: 0.005 -> 0.001"], "the same in every step"),
        ("seq_len = 24", "seq_len = 16", (), ["from step 14 on: training.seq_len: 24 -> 16"], "the same up to step 13"),
        (
            "training.global_batch_size = 4",
            "training.global_batch_size = 2",
            (),
            [
                "from step 8 on: training.global_batch_size: 4 -> 2",
                "from step 14 on: training.seq_len: 24 -> 32",
                "from step 14 on: training.global_batch_size: 8 -> 2",
                "from step 14 on: lr_schedule.name: \"linear\" -> \"cosine\"",
                "from step 14 on: lr_schedule.warmup_steps: 0 -> 2",
                "from step 14 on: lr_schedule.total_steps: 7 -> 20",
                "from step 14 on: lr_schedule begins at step: 14 -> 1",
                "from step 20 on: lr_schedule begins at step: 14 -> 20",
            ],
            "the same, but cut into other batches from step 8 on",
        ),
        ("seq_len = 24", "seq_len = 16", HALF, None, "the first 80 are the same, but cut into other batches"),
    ],
)  # fmt: skip
def test_stages_that_differ_are_named_with_their_step(tmp_path, old, new, words, differs, shared):
    one, other = job_with(tmp_path, STAGES), job_with(tmp_path, STAGES.replace(old, new), *words)
    if differs is not None:
        assert differences(one, other) == differs
    for pair in ((one, other), (other, one)):
        assert str(pairing(*pair)).endswith(f"samples: {shared}")


@pytest.mark.parametrize("words", [(), HALF])
def test_samples_are_the_same_as_far_as_it_is_said(tmp_path, words):
    """Across borders, in batches of one size and of two."""
    jobs = job_with(tmp_path, STAGES), job_with(tmp_path, STAGES.replace("seq_len = 24", "seq_len = 16"), *words)
    number = pairing(*jobs).other_samples_from
    assert number == 80
    both = [samples_through(job, 96) for job in jobs]
    assert [np.array_equal(*pair) for pair in zip(*both, strict=True)] == [True] * number + [False] * (96 - number)


def samples_through(job, n):
    """The tokens of the first samples of a run through its stages."""
    rows = []
    data = None
    config = job.config
    for stage, following in zip_longest(job.stages, job.stages[1:]):
        data = data and forked_position(data, config.model_dump(mode="json"), stage.config)
        config = stage.config
        n_steps = following.border.after - stage.border.after if following else n // config.training.global_batch_size
        mesh = SimpleNamespace(dp_rank=0, sizes=SimpleNamespace(dp=1))
        with closing(open_loader(config, mesh, data or {"next_sample": 0, "sources": None})) as loader:
            for _ in range(n_steps):
                rows += [row for batch in next(loader) for row in batch.tokens.numpy()]
            data = loader.state_dict()
    return rows[:n]


def test_what_differs_is_named():
    words = (
        "--optimizer.lr",
        "2e-2",
        "--mesh.tp",
        "2",
        "--training.seed",
        "3",
        "--job.name",
        "b",
        "--checkpoint.init_from",
        "x",
        "--distillation.teacher",
        "y",
    )
    after = load("tests/end_to_end/tiny.toml", words, 2)
    assert differences(job_of(), after) == [
        "optimizer.lr: 0.01 -> 0.02",
        'distillation.teacher: (not set) -> "y"',
        "mesh.tp: 1 -> 2 (machine key)",
        'checkpoint.init_from: (not set) -> "x" (machine key)',
    ]
    assert pairing(job_of(), after).same_weights == 0
    assert str(Pairing(3, 3, 0, None, None)) == "initial weights: the same bits; samples: the same in every step"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--training.seq_len", "8"), "training.seq_len: 16 -> 8"),
        (("--validation.sequences", "8"), "validation.sequences: 64 -> 8"),
        (("--data.document_mask", "true"), "data.document_mask: false -> true"),
    ],
)
def test_what_can_not_be_scored_alike_is_refused(words, named):
    with pytest.raises(Exception, match=named):
        require_same_scoring(config_of(), config_of(*words))
    require_same_scoring(config_of(), config_of("--validation.interval", "0", "--optimizer.lr", "1"))


def test_the_values_of_a_sweep():
    arms = arms_of(["debug.toml"], ("--training.steps=5",), "optimizer.betas=[0.9, 0.95],[0.9,0.99]")
    assert [arm.label for arm in arms] == ["optimizer.betas=[0.9, 0.95]", "optimizer.betas=[0.9,0.99]"]
    assert arms[1].words == ("--training.steps=5", "--optimizer.betas", "[0.9,0.99]")
    for files, sweep in (
        (["a"], "optimizer.lr=1"),
        (["a"], "optimizer.lr"),
        (["a", "b"], "optimizer.lr=1,2"),
        (["a"], None),
    ):
        with pytest.raises(Exception, match="job file"):
            arms_of(files, (), sweep)
    with pytest.raises(ConfigError, match=r"^--sweep lr: no such key; did you mean optimizer\.lr\?$"):
        arms_of(["a"], (), "lr=1,2")
