"""The checks between keys: each wrong combination, and that its neighbor that is right passes."""

import pytest

from configs.errors import ConfigError
from configs.load import load
from tests.unit.small_job import JOB

LATENT = (
    "model.attention=latent model.latent.key_value_rank=8 model.latent.rope_head_dim=4 model.latent.value_head_dim=6"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)


def problems(settings, world_size=None):
    """The messages for overrides written as `key=value key=value`: mistakes, or else warnings."""
    words = [f"--{word}" for word in settings.split()]
    try:
        return list(load("job.toml", words, world_size).warnings)
    except ConfigError as error:
        return str(error).split("\n")


SOURCE = "data.sources=[{name='s',kind='%s'%s}]"
HELD_OUT = "validation.sources=[{name='v',kind='synthetic'}]"


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
            "rotary embeddings rotate pairs of features, so it must be even",
        ),
        (
            "model.head_dim=15",
            "--model.head_dim: head_dim 15 is odd; rotary embeddings rotate pairs of features, so it must be even",
        ),
        ("model.n_kv_heads=3", "--model.n_kv_heads: n_heads 4 is not divisible by n_kv_heads 3 (4 / 3 = 1.33)"),
        (
            "model.mup_base_dim=16 model.embedding_scale=sqrt_dim",
            "--model.embedding_scale: sqrt_dim grows with dim, and muP (model.mup_base_dim) keeps the embeddings' "
            "scale; set the base's, embedding_scale = 4",
        ),
        (
            "distillation.teacher=runs/big training.loss=torch.nn.functional:nll_loss",
            'place this job has "torch.nn.functional:nll_loss"; leave distillation.teacher out, or training.loss',
        ),
        ("distillation.teacher=", '"" names nothing (is a variable of the shell not set?); leave it out'),
        ("distillation.weight=0.7", "distillation.weight does nothing without teacher; leave it out, or set teacher"),
        ("model.mup_base_head_dim=8", "model.mup_base_head_dim does nothing without mup_base_dim"),
        (
            "model.rope_scaling={factor=8.0,low_freq_factor=4.0}",
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        (
            'model.rope_scaling={kind="yarn",factor=8.0,low_freq_factor=2.0}',
            'model.rope_scaling.low_freq_factor does nothing with kind = "yarn"',
        ),
        (
            'model.rope_scaling={kind="yarn",factor=8.0,beta_slow=40.0}',
            "beta_fast 32.0 must be above beta_slow 40.0",
        ),
        ("model.rope_fraction=0.2", "rope_fraction 0.2 of head_dim 16 is 3 features; rotary embeddings rotate pairs"),
        ("model.rope_fraction=0.01", "rope_fraction 0.01 of head_dim 16 is less than one feature"),
        ("model.norm_offset=true model.qk_norm=full", 'no published model has both; set qk_norm = "head"'),
        ("model.latent.query_rank=8", 'latent.query_rank does nothing with model.attention = "grouped" (the default)'),
        (f"{LATENT} model.n_kv_heads=2", "n_kv_heads 2 with latent attention, which has keys and values for each of"),
        (
            f"{LATENT} model.qk_norm=head",
            'qk_norm does nothing with attention = "latent" (--model.attention), only with "grouped"',
        ),
        (f"{LATENT} model.latent.rope_head_dim=5", "--model.latent.rope_head_dim: rope_head_dim 5 is odd"),
        (f"{LATENT} model.latent.rope_head_dim=34", "rope_head_dim 34 is above head_dim 16"),
        (f"{LATENT} model.latent.value_head_dim=34", "value_head_dim 34 is above head_dim 16, the width of queries"),
        (
            "model.n_experts=6 model.router.groups_per_token=2",
            "groups_per_token does nothing without n_groups",
        ),
        ("model.n_experts=6 model.router.n_groups=4", "make no 4 groups of two experts or more (6 / 4 = 1.50)"),
        ("model.n_experts=6 model.router.n_groups=6", "make no 6 groups of two experts or more (6 / 6 = 1.00)"),
        (
            "model.n_experts=8 model.router.n_groups=2 model.router.groups_per_token=3",
            "--model.router.groups_per_token: groups_per_token 3 is above n_groups 2",
        ),
        (
            "model.n_experts=8 model.experts_per_token=3 model.router.n_groups=4",
            "experts_per_token 3 is above the 2 experts in groups_per_token 1 groups",
        ),
        (
            "model.delta.key_heads=2",
            "--model.delta.key_heads: no layer is of kind \"delta\" in model.layers ['full']; leave delta out",
        ),
        (
            "model.rope_scaling.kind=yarn model.rope_scaling.factor=4 model.rope_theta=1.0",
            "--model.rope_theta: rope_theta 1 with rope_scaling of kind yarn, which needs a base above 1",
        ),
        (
            'model.layers=["delta"] optimizer.qk_clip=100',
            "optimizer.qk_clip: no layer has attention (model.layers), whose queries and keys it scales; leave it out",
        ),
        (
            'model.layers=["delta","full"] model.delta.key_heads=3',
            "value_heads 32 is not divisible by key_heads 3 (32 / 3 = 10.67); change one of them",
        ),
        (
            'model.layers=["delta","full","full","full","full"]',
            "--model.layers: layers names the kinds of 5 layers, and n_layers is 4; shorten the list",
        ),
        (
            'model.layers=["delta","full"] model.delta.key_heads=2 mesh.tp=4',
            "tp 4 does not divide model.delta.key_heads 2 (2 / 4 = 0.50)",
        ),
        (
            'model.layers=["delta","full"] model.delta.key_heads=2 mesh.cp=2 mesh.tp=2 context.method=all_to_all',
            "cp 2 x tp 2 = 4 does not divide model.delta.key_heads 2 (2 / 4 = 0.50), of which",
        ),
        (
            "float8.recipe=rowwise_with_gw_hp float8.emulate=true float8.experts=true",
            "--float8.experts: the model has no experts (model.n_experts); leave float8.experts out",
        ),
        (
            "float8.recipe=rowwise_with_gw_hp float8.experts=true model.n_experts=4 training.compute_dtype=float32",
            'experts multiply in float8 only for compute_dtype "bfloat16"; set it, or float8.emulate = true',
        ),
        (
            'model.layers=["delta","full"] optimizer.name=muon optimizer.split_heads=true',
            "layers of kind delta (model.layers) have no q_proj, k_proj and v_proj whose rows are heads; leave it out",
        ),
        (
            "model.shared_expert_gate=true model.n_experts=4",
            "shared_expert_gate does nothing with n_shared_experts = 0 (the default), so no output would be multiplied",
        ),
        ("model.window_pattern=2", "model.window_pattern does nothing without window"),
        ("model.window=8 model.window_pattern=1", "window_pattern 1 leaves no layer with a window"),
        (
            'model.layers=["delta","full"] model.window=8 model.window_pattern=2',
            "window_pattern 2 leaves no layer with a window; leave model.window out",
        ),
        ("model.window=8 attention.backend=flash3", "--attention.backend: flash3 computes no window (model.window)"),
        (
            "model.n_shared_experts=1",
            "model.n_shared_experts does nothing without n_experts; leave it out, or set n_experts",
        ),
        (
            "model.router.renormalize=false",
            "--model.router.renormalize: model.router.renormalize does nothing without model.n",
        ),
        ("model.n_experts=4 model.experts_per_token=5", "experts_per_token 5 is above n_experts 4"),
        ("model.n_experts=4 model.n_dense_layers=4", "n_dense_layers 4 of n_layers 4 leaves no layer with experts"),
        (
            "model.n_experts=4 model.expert_dim=64",
            "ffn_dim 128 applies to no layer, because n_dense_layers is 0; set ffn_dim = 64",
        ),
        (
            "model.n_experts=4 model.experts_per_token=1",
            "renormalize makes every weight 1 with experts_per_token = 1, so the router would learn nothing",
        ),
        (
            "model.n_experts=4 model.router.bias_update_rate=0.01",
            'bias_update_rate does nothing with load_balance = "auxiliary_loss" (the default), only with "bias"',
        ),
        (
            "model.n_experts=4 model.n_dense_layers=1 model.expert_dim=66 mesh.tp=4",
            "tp 4 does not divide model.expert_dim 66 (66 / 4 = 16.50)",
        ),
        (
            "training.dtype=float64",
            'must all be float64 or none, but compute_dtype is "float32" and reduce_dtype is "float32"',
        ),
        (
            "mesh.dp_shard=0",
            "--mesh.dp_shard: dp_shard must be 1 or more, or -1 for all ranks that the other sizes leave, got 0",
        ),
        ("training.global_batch_size=9 training.micro_batch_size=4", "9 sequences cannot be cut into micro-batches"),
        ("mesh.ep=2", "--mesh.ep: ep 2 distributes experts, but model.n_experts is not set; leave ep out"),
        (
            "mesh.ep=3 model.n_experts=8 training.global_batch_size=6",
            "--mesh.ep: ep 3 does not divide model.n_experts 8 (8 / 3 = 2.67), but each rank must hold",
        ),
        (
            "mesh.ep=4 mesh.dp_shard=3 mesh.cp=2 model.n_experts=8 training.global_batch_size=6",
            "--mesh.ep: ep 4 does not divide dp_shard 3 x cp 2 = 6 (6 / 4 = 1.50), the ranks that it distributes "
            "experts over; set ep to a divisor of 6, or change dp_shard",
        ),
        ("mesh.tp=8", "--mesh.tp: tp 8 does not divide model.n_heads 4 (4 / 8 = 0.50)"),
        ("mesh.tp=4 model.n_kv_heads=2", "--mesh.tp: tp 4 does not divide model.n_kv_heads 2 (2 / 4 = 0.50)"),
        ("mesh.tp=4 model.ffn_dim=130", "--mesh.tp: tp 4 does not divide model.ffn_dim 130 (130 / 4 = 32.50)"),
        ("mesh.tp=4 model.vocab_size=510", "--mesh.tp: tp 4 does not divide model.vocab_size 510 (510 / 4 = 127.50)"),
        ("mesh.tp=4 training.seq_len=30", "--mesh.tp: tp 4 does not divide training.seq_len 30 (30 / 4 = 7.50)"),
        (
            "mesh.cp=4 training.seq_len=36",
            "--mesh.cp: 2 x cp 4 = 8 does not divide training.seq_len 36 (36 / 8 = 4.50), but a rank takes two chunks",
        ),
        (
            "mesh.cp=2 mesh.tp=2 training.seq_len=36",
            "--mesh.cp: 2 x cp 2 x tp 2 = 8 does not divide training.seq_len 36 (36 / 8 = 4.50)",
        ),
        (
            "mesh.cp=8 context.method=all_to_all model.n_heads=8 training.seq_len=36",
            "--mesh.cp: cp 8 does not divide training.seq_len 36 (36 / 8 = 4.50), but a rank takes one chunk",
        ),
        (
            "mesh.cp=4 context.method=all_to_all model.n_kv_heads=2",
            '--context.method: "all_to_all" splits the heads over the ranks, but cp 4 does not divide n_kv_heads 2 '
            '(2 / 4 = 0.50); use "gather" or "ring", or change cp',
        ),
        (
            "mesh.cp=2 mesh.tp=2 context.method=all_to_all model.n_kv_heads=2",
            "but cp 2 x tp 2 = 4 does not divide n_kv_heads 2 (2 / 4 = 0.50)",
        ),
        (
            "fsdp.zero_stage=2 fsdp.reshard_after_forward=always",
            '--fsdp.reshard_after_forward: fsdp.reshard_after_forward = "always" does nothing with zero_stage = 2 '
            "(--fsdp.zero_stage), which keeps parameters gathered from forward to backward; leave it out",
        ),
        (
            "fsdp.zero_stage=1 fsdp.reshard_after_forward=always",
            "zero_stage = 1 (--fsdp.zero_stage), which keeps parameters gathered",
        ),
        (
            "fsdp.zero_stage=2 fsdp.accumulate=reduce_last",
            '--fsdp.accumulate: fsdp.accumulate = "reduce_last" does nothing with zero_stage = 2 (--fsdp.zero_stage), '
            "which reduces every micro-batch",
        ),
        (
            SOURCE % ("text", ",path='x',document_length=9") + " tokenizer.path=t",
            '--data.sources: data.sources.0.document_length does nothing with kind = "text" (--data.sources), only '
            'with "synthetic"',
        ),
        (
            "activation_checkpoint.mode=full activation_checkpoint.save_ops=['aten.mm']",
            '--activation_checkpoint.save_ops: activation_checkpoint.save_ops does nothing with mode = "full" '
            '(--activation_checkpoint.mode), only with "selective"; leave it out, or change mode',
        ),
        ("fault.spikes.threshold=5.0", 'threshold does nothing with action = "none" (the default), only'),
        (
            "fault.spikes.action=skip fault.spikes.rewind_interval=5",
            '--fault.spikes.rewind_interval: fault.spikes.rewind_interval does nothing with action = "skip"',
        ),
        (
            "activation_checkpoint.save_every_nth_matmul=2",
            'does nothing with mode = "none" (the default), only with "sel',
        ),
        ("activation_checkpoint.every_nth_layer=2", '"none" (the default), only with "full" or "selective"; leave'),
        (
            "activation_checkpoint.layers='0'",
            'layers does nothing with mode = "none" (the default), only with "full" or',
        ),
        (
            "activation_checkpoint.memory_budget=0.1",
            'does nothing with mode = "none" (the default), only with "budget"',
        ),
        ("activation_checkpoint.mode=budget", "set compile.enable = true"),
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
        (
            "job.device=cpu fsdp.cpu_offload=true",
            "(--job.device), where the state is in CPU memory anyway; leave it out",
        ),
        (
            "fsdp.partition=owner mesh.dp_shard=1 mesh.dp_replicate=4 mesh.tp=2 fsdp.cpu_offload=true",
            'partition "owner" sends parameters from where they are',
        ),
        (SOURCE % ("tokens", ",path='x'"), 'job.toml: a tokenizer is needed for source "s": set tokenizer.path'),
        ("data.prepare={input=['a'],output='b'}", "a tokenizer is needed for [data.prepare]: set tokenizer.path"),
        ("tokenizer.train_on=['a']", "--tokenizer.train_on: train_on needs path"),
        ("data.prepare={input=['a'],output='b'} tokenizer.path=''", "a tokenizer is needed for [data.prepare]: set"),
        ("checkpoint.init_from=", '--checkpoint.init_from: "" names nothing (is a variable of the shell not set?)'),
        ("checkpoint.load=", '--checkpoint.load: "" names nothing'),
        ("tokenizer.train_on=['a'] tokenizer.path=t.json", "train_on makes a SentencePiece model"),
        (
            SOURCE % ("text", "") + " tokenizer.path=t",
            'source "s" of kind "text" needs path: a file, a folder, or hub:NAME',
        ),
        (
            SOURCE % ("synthetic", ",path='x'"),
            'kind = "synthetic" (--data.sources), whose tokens are read from nowhere; leave it out',
        ),
        (
            SOURCE % ("synthetic", ",text_key='x'"),
            'text_key does nothing with kind = "synthetic" (--data.sources), only wi',
        ),
        (SOURCE % ("synthetic", "},{name='s',kind='synthetic'"), 'duplicate source name "s"'),
        ("tokenizer.path=t data.prepare={input=[],output='b'}", "input is empty"),
        (
            "tokenizer.path=t data.prepare={input=['a'],output='b',prompt_key='p',mask_until='?'}",
            "--data.prepare: prompt_key and mask_until both say what gives loss; leave one out",
        ),
        (
            "tokenizer.path=t data.prepare={input=['a'],output='b',prompt_key='p',text_key='p'}",
            '--data.prepare: prompt_key and text_key both name "p"',
        ),
        (
            "tokenizer.path=t data.prepare={input=['a'],output='b/'} "
            "validation.sources=[{name='v',kind='tokens',path='b/validation'}]",
            "b/validation will be empty, because data.prepare.validation_fraction is 0",
        ),
        (
            "mesh.pp=2 pipeline.split=[3,2]",
            "--pipeline.split: split [3, 2] covers 3 + 2 = 5 layers, but n_layers is 4",
        ),
        ("mesh.pp=2 pipeline.split=[4]", "--pipeline.split: split [4] has 1 stages, but there are pp 2 = 2"),
        ("mesh.pp=5", "--mesh.pp: pp 5 = 5 stages are more than n_layers 4; each stage needs a layer"),
        (
            "mesh.pp=3 pipeline.schedule=interleaved_1f1b training.micro_batch_size=8",
            "--mesh.pp: pp 3 x 2 stages a rank = 6 stages are more than n_layers 4",
        ),
        (
            "mesh.pp=4 training.micro_batch_size=4",
            "--training.micro_batch_size: global_batch_size 8 / (dp 1 x micro_batch_size 4) = 2 micro-batches are too "
            'few for schedule "1f1b", which needs one for each of pp 4 stages; change one of them',
        ),
        (
            "mesh.pp=2 pipeline.schedule=interleaved_1f1b training.global_batch_size=5",
            '= 5 micro-batches do not fit schedule "interleaved_1f1b", which computes them in 5 // pp 2 = 2 rounds of '
            "equal size, and 2 does not divide 5",
        ),
        ("pipeline.stages_per_rank=2", 'stages_per_rank does nothing with schedule = "1f1b" (the default), only'),
        (
            "mesh.pp=2 model.tie_embeddings=true pipeline.schedule=zero_bubble_v",
            "puts the first and the last stage on one rank, which would hold a tied matrix",
        ),
        (
            "mesh.pp=2 model.tie_embeddings=true training.reduction=exact",
            "with pp 2 both ends add up their gradients of a whole step",
        ),
        (
            "mesh.pp=2 model.multi_token.depth=1 pipeline.schedule=zero_bubble_v",
            "would hold a tied matrix (model.multi_token) twice",
        ),
        (
            "mesh.pp=2 model.multi_token.depth=1 training.reduction=exact",
            "(model.multi_token); leave model.multi_token out, or pp = 1",
        ),
        ("model.multi_token.loss_weight=0.1", "loss_weight does nothing without depth"),
        ("model.multi_token.depth=16 training.seq_len=16", "depth 16 looks 17 tokens ahead, and sequences have 16"),
        ("mesh.pp=2 pipeline.schedule=zero_bubble_v compile.enable=true", "but a compiled block has only one"),
        (
            "compile.mode=max-autotune",
            "compile.mode does nothing with enable = false (the default), which compiles nothing",
        ),
        (
            "compile.enable=true compile.mode=reduce-overhead mesh.dp_shard=2",
            "CUDA graphs need parameters that stay where they are in memory, but on 2 ranks they are freed",
        ),
        (
            "compile.enable=true compile.mode=max-autotune fsdp.reshard_after_forward=always",
            'but with fsdp.reshard_after_forward "always" they are freed',
        ),
        (
            "compile.enable=true compile.mode=max-autotune-no-cudagraphs training.reduction=exact",
            'but training.reduction "exact" fixes the order',
        ),
        (
            "mesh.pp=2 pipeline.schedule=zero_bubble_v activation_checkpoint.mode=selective",
            'but what activation_checkpoint.mode = "selective" keeps lasts for one',
        ),
        (
            "mesh.pp=2 pipeline.schedule=zero_bubble_v fsdp.reshard_after_forward=always",
            "but the second would lack the parameters that FSDP freed",
        ),
        ("validation.interval=5", "--validation.interval: interval 5 needs [[validation.sources]]"),
        ("lr_schedule.warmup_steps=11", "--lr_schedule.warmup_steps: warmup_steps 11 is above total_steps 10"),
        (
            "average.interval=1 training.dtype=bfloat16",
            "--average.interval: with decay 0.999, each update of an average",
        ),
        ("average.dtype=bfloat16", "average.dtype does nothing with interval = 0"),
        (
            "optimizer.name=muon optimizer.split_heads=true model.attention=latent model.head_dim=128",
            "--optimizer.split_heads: latent attention has no q_proj, k_proj and v_proj whose rows are heads",
        ),
        ("average.decay=0.9", "average.decay does nothing with interval = 0 (the default), which keeps no average"),
        ("lr_schedule.name=constant lr_schedule.min_lr_ratio=0.2", 'min_lr_ratio does nothing with name = "constant"'),
        (
            "lr_schedule.name=inverse_sqrt lr_schedule.warmup_steps=7 lr_schedule.decay_steps=4",
            "is above total_steps 10",
        ),
        ("expert.exchange=buffers", 'ep 1 exchanges nothing, and so exchange = "buffers" does nothing; leave it out'),
        ("expert.buffer_factor=3.0", 'buffer_factor does nothing with exchange = "uneven" (the default)'),
        ("lr_schedule.total_tokens=3", "ends at total_steps or at total_tokens, and this one has both"),
        ("lr_schedule.warmup_tokens=3", "lr_schedule.warmup_tokens does nothing without total_tokens; leave it out"),
        ("lr_schedule.decay_steps=3", 'lr_schedule.decay_steps does nothing with name = "cosine"'),
        (
            "lr_schedule.name=warmup_stable_decay lr_schedule.warmup_steps=7 lr_schedule.decay_steps=4",
            "--lr_schedule.decay_steps: warmup_steps 7 + decay_steps 4 = 11 is above total_steps 10",
        ),
        (
            "optimizer.groups=[{pattern='a',freeze=true,freeze_until_step=5}]",
            "optimizer.groups.0.freeze_until_step does nothing with freeze = true",
        ),
        ("optimizer.groups=[{pattern='a'},{pattern='a'}]", 'duplicate pattern "a"; only the first applies'),
        (
            "fsdp.owner_broadcast_dtype=bfloat16",
            '--fsdp.owner_broadcast_dtype: fsdp.owner_broadcast_dtype does nothing with partition = "rows" (the '
            'default), only with "owner"',
        ),
        (
            "fsdp.partition=owner fsdp.owner_broadcast_dtype=bfloat16 training.dtype=bfloat16",
            'does nothing with training.dtype = "bfloat16" (--training.dtype), only with "float32" or "float64"; ',
        ),
        (
            "fsdp.partition=owner mesh.dp_replicate=2 mesh.ep=4 model.n_experts=4",
            "--mesh.ep: ep 4 does not divide dp_replicate 2 x cp 1 = 2 (2 / 4 = 0.50), the ranks that it distributes "
            "experts over; set ep to a divisor of 2, or change dp_replicate",
        ),
        (
            "fsdp.partition=owner mesh.dp_shard=4 mesh.ep=2 model.n_experts=4",
            'partition "owner" needs whole parameters, but dp_shard 4 cuts them (on 4 ranks, dp_replicate 1); '
            "set mesh.dp_replicate = 4 and mesh.dp_shard = 1",
        ),
        (
            "fsdp.partition=owner fsdp.zero_stage=2",
            'fsdp.zero_stage does nothing with partition = "owner" (--fsdp.partition)',
        ),
        (
            "fsdp.partition=owner mesh.dp_replicate=2 mesh.dp_shard=2",
            'partition "owner" needs whole parameters, but dp_shard 2 cuts them (on 4 ranks, dp_replicate 2); '
            "set mesh.dp_replicate = 4 and mesh.dp_shard = 1",
        ),
        (
            "optimizer.momentum=0.9",
            'momentum does nothing with name = "adamw" (the default), only with "muon" or "module:Class"; leave',
        ),
        (
            "profile.memory_snapshot=true",
            "does nothing with start_step = 0 (the default), which traces no steps",
        ),
        (
            "profile.memory_snapshot=true profile.start_step=1 job.device=cpu",
            'with job.device = "cpu" (--job.device), which has no CUDA',
        ),
        ("profile.start_step=21", "the trace would end at step 23, after training.steps 10"),
        ("profile.start_step=9", "the trace would end at step 11, after training.steps 10"),
        ("job.name=a/b", '--job.name: the run folder is runs/<name>, so name "a/b" must be a plain folder name'),
        ("checkpoint.load=-5", "--checkpoint.load: there is no step -5"),
        ("checkpoint.go_back=1", '--checkpoint.go_back: go_back does nothing with load = "latest"'),
        (
            "checkpoint.load=5 checkpoint.init_from=x",
            "init_from does nothing with load = 5 (--checkpoint.load), which the run begins",
        ),
        ("checkpoint.keep_every=5", "keep_every does nothing with keep_last = 0 (the default), which keeps all"),
        (
            "checkpoint.keep_last=1 checkpoint.keep_best=1",
            "--checkpoint.keep_best: keep_best needs a validation at every checkpoint",
        ),
        (
            "training.dtype=bfloat16 optimizer.moments_dtype=bfloat16",
            'optimizer.moments_dtype does nothing with training.dtype = "bfloat16" (--training.dtype), and so ',
        ),
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
        "fsdp.partition=owner fsdp.owner_broadcast_dtype=bfloat16 mesh.dp_replicate=2",
        "fsdp.partition=owner optimizer.name=muon optimizer.momentum=0.9",
        "fsdp.partition=owner mesh.dp_replicate=4 mesh.ep=2 model.n_experts=4",
        "fsdp.partition=owner mesh.cp=2 mesh.ep=2 model.n_experts=4",
        "fsdp.partition=owner mesh.tp=2 mesh.cp=2 optimizer.name=muon",
        "model.n_experts=4 mesh.ep=2 optimizer.name=muon",
        "mesh.cp=2 mesh.tp=2 training.seq_len=40",
        "mesh.cp=2 context.method=all_to_all training.seq_len=30",
        "context.method=all_to_all model.n_kv_heads=1",
        "fsdp.zero_stage=1 fsdp.accumulate=reduce_last",
        "fsdp.zero_stage=2 fsdp.reshard_after_forward=never",
    ],
)
def test_a_right_combination_passes(settings):
    assert problems(settings) == []


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (
            "mesh.cp=2 mesh.dp_shard=2",
            2,
            "2 ranks cannot form the mesh: dp_replicate 1 x dp_shard 2 x cp 2 x tp 1 = 4, not 2; start 4 ranks",
        ),
        ("mesh.cp=2 mesh.tp=2", 6, "6 ranks cannot form the mesh: dp_replicate 1 x cp 2 x tp 2 = 4 does not divide 6"),
        ("mesh.tp=2 mesh.dp_shard=2", 8, "dp_replicate 1 x dp_shard 2 x tp 2 = 4, not 8; start 4 ranks"),
        ("mesh.tp=4", 6, "6 ranks cannot form the mesh: dp_replicate 1 x tp 4 = 4 does not divide 6"),
        ("mesh.dp_replicate=2", 1, "1 rank cannot form the mesh: dp_replicate 2 x tp 1 = 2 does not divide 1"),
        (
            "training.micro_batch_size=2",
            3,
            "dp_replicate 1 x dp_shard 3 x micro_batch_size 2 = 6 does not divide 8; a global batch of 6 or 12",
        ),
        ("training.micro_batch_size=8", 2, "a global batch of 16 would do"),
        ("fsdp.partition=owner", 4, "dp_shard 4 cuts them (on 4 ranks, dp_replicate 1); set mesh.dp_replicate = 4"),
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
