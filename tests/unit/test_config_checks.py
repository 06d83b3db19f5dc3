"""The checks between keys: each wrong combination, and that its neighbor that is right passes."""

import pytest

from configs.errors import ConfigError
from configs.load import load

JOB = """
[job]
name = "trial"
[model]
dim = 64
n_layers = 4
n_heads = 4
ffn_dim = 128
vocab_size = 512
[[data.sources]]
name = "random"
kind = "synthetic"
[training]
steps = 10
seq_len = 32
global_batch_size = 8
[optimizer]
lr = 1e-3
[lr_schedule]
total_steps = 10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)


def problems(settings, world_size=None):
    """The messages for overrides written as `key=value key=value`."""
    words = [f"--{word}" for word in settings.split()]
    try:
        load("job.toml", words, world_size)
    except ConfigError as error:
        return str(error).split("\n")
    return []


SOURCE = "data.sources=[{name='s',kind='%s'%s}]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "model.dim=66",
            "--model.dim: dim 66 is not divisible by n_heads 4 (66 / 4 = 16.50); change one of them, or set head_dim",
        ),
        (
            "model.dim=12",
            "--model.dim: head_dim 3 = dim 12 / n_heads 4 is odd; "
            "rotary positions turn pairs of features, so it must be even",
        ),
        (
            "model.head_dim=15",
            "--model.head_dim: head_dim 15 is odd; rotary positions turn pairs of features, so it must be even",
        ),
        ("model.n_kv_heads=3", "--model.n_kv_heads: n_heads 4 is not divisible by n_kv_heads 3 (4 / 3 = 1.33)"),
        (
            "model.rope_scaling={factor=8.0,low_freq_factor=4.0}",
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        ("training.dtype=float64", 'all float64 or none, but compute_dtype is "float32" and reduce_dtype is "float32"'),
        ("mesh.dp_shard=0", "--mesh.dp_shard: dp_shard must be 1 or more, or -1 for what the other sizes leave, got 0"),
        ("training.global_batch_size=9 training.micro_batch_size=4", "9 sequences cannot be cut into micro-batches"),
        ("mesh.tp=8", "--mesh.tp: tp 8 does not divide model.n_heads 4 (4 / 8 = 0.50)"),
        ("mesh.tp=4 model.n_kv_heads=2", "--mesh.tp: tp 4 does not divide model.n_kv_heads 2 (2 / 4 = 0.50)"),
        ("mesh.tp=4 model.ffn_dim=130", "--mesh.tp: tp 4 does not divide model.ffn_dim 130 (130 / 4 = 32.50)"),
        ("mesh.tp=4 model.vocab_size=510", "--mesh.tp: tp 4 does not divide model.vocab_size 510 (510 / 4 = 127.50)"),
        ("mesh.tp=4 training.seq_len=30", "--mesh.tp: tp 4 does not divide training.seq_len 30 (30 / 4 = 7.50)"),
        (
            "activation_checkpoint.mode=full activation_checkpoint.save_ops=['aten.mm']",
            '--activation_checkpoint.save_ops: save_ops does nothing in mode "full", only in "selective"',
        ),
        ("activation_checkpoint.save_every_nth_matmul=2", 'does nothing in mode "none", only in "selective"'),
        ("activation_checkpoint.every_nth_layer=2", 'does nothing in mode "none", only in "full" or "selective"'),
        ("activation_checkpoint.layers='0'", 'does nothing in mode "none", only in "full" or "selective"'),
        ("activation_checkpoint.memory_budget=0.1", 'does nothing in mode "none", only in "budget"'),
        ("activation_checkpoint.mode=budget", "it needs compile.enable = true"),
        (
            "activation_checkpoint.mode=full activation_checkpoint.every_nth_layer=5",
            "every_nth_layer 5 selects none of 4 layers",
        ),
        (
            "activation_checkpoint.mode=full activation_checkpoint.layers='0-4'",
            "there is no layer 4: with n_layers = 4",
        ),
        ("activation_checkpoint.mode=full activation_checkpoint.layers='3-1'", 'the layers in "3-1" must ascend'),
        ("activation_checkpoint.mode=full activation_checkpoint.layers='1,1'", 'the layers in "1,1" must ascend'),
        ("activation_checkpoint.mode=full activation_checkpoint.layers='0-'", "'0-' is no layer or range of layers"),
        ("activation_checkpoint.mode=full activation_checkpoint.layers=''", "'' is no layer or range of layers"),
        ("job.device=cpu fsdp.cpu_offload=true", "--fsdp.cpu_offload: cpu_offload does nothing with job.device"),
        (SOURCE % ("tokens", ",path='x'"), 'job.toml: a tokenizer is needed for source "s": set tokenizer.path'),
        ("data.prepare={input=['a'],output='b'}", "a tokenizer is needed for [data.prepare]: set tokenizer.path"),
        ("tokenizer.train_on=['a']", "--tokenizer.train_on: train_on needs path"),
        ("tokenizer.train_on=['a'] tokenizer.path=t.json", "train_on makes a SentencePiece model"),
        (
            SOURCE % ("text", "") + " tokenizer.path=t",
            'source "s" of kind "text" needs path: a file, a folder, or hub:NAME',
        ),
        (SOURCE % ("synthetic", ",path='x'"), "synthetic tokens are read from nowhere; leave path out"),
        (SOURCE % ("synthetic", ",text_key='x'"), 'text_key does nothing with kind "synthetic", only with "text"'),
        (SOURCE % ("synthetic", "},{name='s',kind='synthetic'"), 'a source named "s" stands above already'),
        ("tokenizer.path=t data.prepare={input=[],output='b'}", "input names no text"),
        (
            "tokenizer.path=t data.prepare={input=['a'],output='b',validation_fraction=1.0}",
            "leaves nothing to train on",
        ),
        (
            "tokenizer.path=t data.prepare={input=['a'],output='b/'} "
            "validation.sources=[{name='v',kind='tokens',path='b/validation'}]",
            "nothing will be in b/validation: data.prepare.validation_fraction is 0",
        ),
        (
            "mesh.pp=2 pipeline.split=[3,2]",
            "--pipeline.split: split [3, 2] covers 3 + 2 = 5 layers, but n_layers is 4",
        ),
        ("mesh.pp=2 pipeline.split=[4]", "--pipeline.split: split [4] has a number for each of 1 stages, but there are pp 2"),
        ("mesh.pp=5", "--mesh.pp: pp 5 = 5 stages are more than n_layers 4: each needs a layer"),
        (
            "mesh.pp=3 pipeline.schedule=interleaved_1f1b training.micro_batch_size=8",
            "--mesh.pp: pp 3 x 2 stages a rank = 6 stages are more than n_layers 4",
        ),
        (
            "mesh.pp=4 training.micro_batch_size=4",
            "--training.micro_batch_size: global_batch_size 8 / (dp 1 x micro_batch_size 4) = 2 micro-batches are too "
            'few for schedule "1f1b": it needs one for each of pp 4 stages; change one of them',
        ),
        (
            "mesh.pp=2 pipeline.schedule=interleaved_1f1b training.global_batch_size=5",
            '= 5 micro-batches do not fit schedule "interleaved_1f1b": it computes them in 5 // pp 2 = 2 rounds of '
            "equal size, and 2 does not divide 5",
        ),
        ("pipeline.stages_per_rank=2", '--pipeline.stages_per_rank: stages_per_rank does nothing with schedule "1f1b"'),
        ("mesh.pp=2 model.tie_embeddings=true", "--mesh.pp: pp 2 puts the embedding on the first stage and the head"),
        ("mesh.pp=2 pipeline.schedule=zero_bubble_v compile.enable=true", "and a compiled block has only one"),
        (
            "mesh.pp=2 pipeline.schedule=zero_bubble_v activation_checkpoint.mode=selective",
            'what activation checkpointing of mode "selective" keeps lasts for one',
        ),
        (
            "mesh.pp=2 pipeline.schedule=zero_bubble_v fsdp.reshard_after_forward=always",
            "parameters that FSDP freed would be missing in the second",
        ),
        ("validation.interval=5", "--validation.interval: interval 5 needs [[validation.sources]]"),
        ("lr_schedule.warmup_steps=11", "--lr_schedule.warmup_steps: warmup_steps 11 is above total_steps 10"),
        ("lr_schedule.decay_steps=3", 'decay_steps does nothing with name "cosine"'),
        (
            "lr_schedule.name=warmup_stable_decay lr_schedule.warmup_steps=7 lr_schedule.decay_steps=4",
            "--lr_schedule.decay_steps: warmup_steps 7 + decay_steps 4 = 11 is above total_steps 10",
        ),
        ("optimizer.groups=[{pattern='a'},{pattern='a'}]", 'the pattern "a" stands above already; the first counts'),
        ("profile.memory_snapshot=true", "memory_snapshot needs start_step above 0"),
        ("profile.memory_snapshot=true profile.start_step=1 job.device=cpu", "memory_snapshot records CUDA memory"),
        ("profile.start_step=9", "the trace would end at step 11, after training.steps 10"),
        ("job.name=a/b", '--job.name: the run folder is runs/<name>, so name "a/b" must be a plain folder name'),
        ("checkpoint.load=-5", "--checkpoint.load: there is no step -5"),
    ],
)
def test_a_wrong_combination_is_one_problem(settings, message):
    found = problems(settings)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    "settings",
    [
        "model.dim=66 model.head_dim=16",
        "model.n_kv_heads=2 mesh.tp=2",
        "training.dtype=float64 training.compute_dtype=float64 training.reduce_dtype=float64",
        "training.dtype=bfloat16 training.compute_dtype=bfloat16",
        "activation_checkpoint.mode=selective activation_checkpoint.save_ops=['aten.mm']",
        "activation_checkpoint.mode=full activation_checkpoint.layers='0-1,3'",
        "activation_checkpoint.mode=budget activation_checkpoint.memory_budget=0.1 compile.enable=true",
        SOURCE % ("text", ",path='hub:x',text_key='content'") + " tokenizer.path=t.model",
        "lr_schedule.name=warmup_stable_decay lr_schedule.warmup_steps=7 lr_schedule.decay_steps=3",
        "profile.memory_snapshot=true profile.start_step=8",
        "job.name=a/b job.output_dir=x",
        "checkpoint.load=0",
        "training.max_norm=inf training.norm_type=inf",
    ],
)
def test_a_right_combination_passes(settings):
    assert problems(settings) == []


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ("mesh.tp=2 mesh.dp_shard=2", 8, "dp_replicate 1 x dp_shard 2 x tp 2 = 4, not 8; start 4 ranks"),
        ("mesh.tp=4", 6, "6 ranks cannot form the mesh: dp_replicate 1 x tp 4 = 4 does not divide 6"),
        ("mesh.dp_replicate=2", 1, "1 rank cannot form the mesh: dp_replicate 2 x tp 1 = 2 does not divide 1"),
        (
            "training.micro_batch_size=2",
            3,
            "dp_replicate 1 x dp_shard 3 x micro_batch_size 2 = 6 does not divide 8; a global batch of 6 or 12",
        ),
        ("training.micro_batch_size=8", 2, "a global batch of 16 would do"),
    ],
)
def test_what_depends_on_the_number_of_ranks(settings, world_size, message):
    found = problems(settings, world_size)
    assert len(found) == 1, found
    assert message in found[0]
    assert problems(settings) == []  # for some number of ranks it would be right


def test_ranks_that_fit():
    assert problems("mesh.tp=2 mesh.dp_replicate=2", 8) == []
    assert problems("mesh.tp=2 mesh.dp_replicate=2 mesh.dp_shard=2", 8) == []


def test_problems_of_a_file_come_together():
    assert len(problems("model.dim=66 mesh.tp=3 lr_schedule.warmup_steps=11 checkpoint.load=-5", 4)) == 8
