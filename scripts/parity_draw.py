"""Draws jobs and meshes at random for the parity table.

A *draw* is a number of ranks and config overrides: run keys, which the reference has as well, and machine keys. On its
way it may evaluate a batch between two steps, and move to another mesh by a checkpoint. Half of the draws compute in
float64, the other half with `training.reduction = "exact"`. A draw is a function of its seed and number alone.
"""

import random
import shlex
from dataclasses import dataclass, field

from configs.reading.overrides import words
from configs.schema import BY_CONTENT, further_run_keys, is_run_key
from scripts.parity_rows import AUTO, DECIDE_BITS, groups_of

Keys = dict[str, object]
"""Config overrides by key; the values are TOML."""

FLOAT64: Keys = {f"training.{key}": "float64" for key in ("dtype", "compute_dtype", "reduce_dtype")}
WRITTEN = '"written"'
"""The place of a teacher that is yet to be written."""
DECISIVE = (*DECIDE_BITS, "attention.backend")
"""Machine keys that may change the bits of a draw with exact sums."""


@dataclass(frozen=True)
class Draw:
    """A job on a mesh."""

    ranks: int
    keys: Keys
    """Overrides of the job file."""
    evaluate_at: tuple[int, ...] = ()
    """Numbers of steps after which a batch is evaluated."""
    move_at: int = 0
    """Number of steps after which the run moves; 0: never."""
    moved: Keys = field(default_factory=dict)
    """Machine keys after the move, in place of those in `keys`."""
    stages: tuple[str, ...] = ()
    """The tables of [[stages]], in TOML."""
    teacher: Keys = field(default_factory=dict)
    """The overrides of the job whose initial weights teach; empty: nothing does."""

    @property
    def is_exact(self) -> bool:
        """Whether bits are compared."""
        return self.keys.get("training.reduction") == "exact"

    @property
    def run(self) -> Keys:
        """The keys that decide what is learned."""
        further = further_run_keys({"training": {"reduction": self.keys.get("training.reduction")}})
        further += ("fsdp.partition",) * ("fsdp.owner_broadcast_dtype" in self.keys) + BY_CONTENT
        return {key: value for key, value in self.keys.items() if is_run_key(key, further) or key == "training.steps"}

    def command(self, config_name: str) -> str:
        """The command that runs this draw alone."""
        options = ["--config", config_name, "--ranks", str(self.ranks)]
        options += ["--evaluate-at", ",".join(map(str, self.evaluate_at))] if self.evaluate_at else []
        options += ["--move-at", str(self.move_at)] if self.move_at else []
        options += [f"--moved={shlex.join(words(self.moved))}"] if self.moved else []
        options += [f"--stage={stage}" for stage in self.stages]
        options += [f"--teacher={shlex.join(words(self.teacher))}"] if self.teacher else []
        return f"python scripts/parity.py {shlex.join((*options, *words(self.keys)))}"


def draw(seed: int, number: int) -> Draw:
    """The `number`-th draw of a seed."""
    dice = random.Random(f"{seed}/{number}")
    ranks = dice.choices((1, 2, 3, 4, 8), (2, 15, 2, 30, 1))[0]
    is_exact = dice.random() < 0.5
    run = _model(dice) | _data(dice) | _training(dice, is_exact)
    owners = dice.random() < 0.35
    run |= _optimizer(dice, is_exact)
    owners = owners or "fsdp.owner_broadcast_dtype" in run
    steps = int(str(run["training.steps"]))
    evaluate_at = tuple(step for step in range(steps) if dice.random() < 0.15)
    move_at = dice.randrange(1, steps) if dice.random() < 0.25 else 0
    machine = _machine(dice, ranks, run, owners)
    moved = _machine(dice, ranks, run, owners)
    if is_exact and any(moved.get(key) != machine.get(key) for key in DECISIVE):
        moved = machine
    if "mesh.pp" not in machine | (moved if move_at else {}):  # only stages need many layers, which cost time
        run["model.n_layers"] = min(int(str(run["model.n_layers"])), 3)
    # Last, so that the draws of a seed are as before these existed.
    run |= _some(dice, 0.3, {"model.qk_norm": "head"}) | _options(dice)
    if run.get("model.qk_norm") == "head":
        # The norm of two numbers is often near 0, and then rounding grows to 1e-8 within eight steps on every mesh.
        run["model.head_dim"] = max(4, int(str(run["model.head_dim"])))
    run = _with_latents(dice, run) | _groups(dice, run)
    run |= _some(dice, 0.15, {"model.multi_token": f"{{depth = {dice.choice((1, 2))}, loss_weight = 0.5}}"})
    run |= _with_states(dice, run)
    run |= _mup(dice, run)
    run |= _qk_clip(dice, run)
    # A token that sees itself alone: the gradients of queries and keys are rounding, which differs with the mesh; signs
    # and Muon's directions enlarge it.
    if run.get("model.window") == 1 and (_takes_signs(run) or run.get("optimizer.name") == "muon"):
        run["model.window"] = 2
    stages = _stages(dice, run)
    run |= _average(dice, run, is_exact)
    if "auxiliary_loss" in str(run.get("model.router.load_balance")):
        run |= _some(dice, 0.4, {"model.router.auxiliary_loss_over": "global_batch"})
    teacher = _teacher(dice, run) if dice.random() < 0.2 else {}
    if teacher:
        run |= {"distillation.teacher": WRITTEN, "distillation.weight": dice.choice((0.3, 0.5, 1.0))}
        run |= _some(dice, 0.5, {"distillation.temperature": dice.choice((0.5, 2.0))})
    return Draw(ranks, run | machine, evaluate_at, move_at, moved if move_at else {}, stages, teacher)


def _model(dice: random.Random) -> Keys:
    kv_heads = dice.choice((1, 2, 2, 4, 4, 4, 4))
    heads = kv_heads * dice.choice((1, 1, 2, 3))
    head_dim = dice.choice((2, 4, 6, 8, 10))
    keys: Keys = {
        "model.dim": dice.choice((16, 20, 24, 32, 34, 48, 64)),
        "model.n_layers": dice.choice((2, 2, 3, 4, 4, 4, 5)),
        "model.n_heads": heads,
        "model.n_kv_heads": kv_heads,
        "model.head_dim": head_dim,
        "model.ffn_dim": dice.choice((24, 32, 44, 48, 64)),
        "model.vocab_size": dice.choice((64, 100, 128, 200)),
    }
    keys |= _some(dice, 0.15, {"model.tie_embeddings": "true"})
    keys |= _some(dice, 0.2, {"model.rope_theta": dice.choice((500.0, 500000.0))})
    keys |= _some(dice, 0.15, {"model.rope_scaling": dice.choice(_SCALINGS)})
    keys |= _some(dice, 0.1, {"model.norm_eps": 1e-3})
    keys |= _some(dice, 0.2, {"model.init_std": dice.choice((0.05, 0.2))})
    return keys | (_experts(dice, keys) if dice.random() < 0.3 else {})


def _experts(dice: random.Random, model: Keys) -> Keys:
    chosen = dice.choice((1, 2, 2, 3))
    keys: Keys = {"model.n_experts": dice.choice((4, 6, 8, 16)), "model.experts_per_token": chosen}
    keys |= {"model.router.scoring": dice.choice(("softmax", "sigmoid"))}
    keys |= {"model.router.renormalize": "false"} if chosen == 1 or dice.random() < 0.3 else {}
    keys |= _some(dice, 0.4, {"model.n_shared_experts": dice.choice((1, 2))})
    if int(str(model["model.n_layers"])) > 1:
        keys |= _some(dice, 0.5, {"model.n_dense_layers": 1, "model.expert_dim": dice.choice((8, 12, 16))})
    balance = dice.choice(("auxiliary_loss", "bias", "none"))
    keys |= {"model.router.load_balance": balance}
    keys |= {"model.router.auxiliary_loss_weight": 0.1} if balance == "auxiliary_loss" else {}
    return keys | ({"model.router.bias_update_rate": 0.01} if balance == "bias" else {})


def _options(dice: random.Random) -> Keys:
    """Options of the families that are no plain Llama."""
    if dice.random() < 0.4:
        return {}
    keys = _some(dice, 0.15, {"model.qk_norm": "full"}) | _some(dice, 0.1, {"model.attention_bias": "true"})
    keys |= _some(dice, 0.1, {"model.attention_gate": "true"}) | _some(dice, 0.1, {"model.query_scale": 3.0})
    keys |= _some(dice, 0.3, {"model.norm_position": dice.choice(("after", "both"))})
    keys |= _some(dice, 0.1, {"model.norm_offset": "true"})
    keys |= _some(dice, 0.1, {"model.embedding_scale": dice.choice(("sqrt_dim", 5.0))})
    keys |= _some(dice, 0.3, {"model.activation": dice.choice(("geglu", "relu_squared"))})
    keys |= _some(dice, 0.1, {"model.rope_fraction": 0.5}) | _some(dice, 0.1, {"model.no_rope_every": 2})
    if dice.random() < 0.3:
        keys |= {"model.window": dice.choice((1, 3, 7, 20)), "model.window_pattern": dice.choice((0, 0, 2, 3))}
        keys |= _some(dice, 0.3, {"model.window_rope_theta": 300.0})
    return keys


_SCALINGS = (
    "{factor = 8.0, original_seq_len = 16}",
    '{kind = "yarn", factor = 4.0, original_seq_len = 16, attention_factor = 1.3}',
    '{kind = "linear", factor = 4.0}',
)
_NOT_OF_LATENTS = ("qk_norm", "attention_bias", "attention_gate", "rope_fraction")
"""Keys of [model] that latent attention does not have."""


def _with_latents(dice: random.Random, run: Keys) -> Keys:
    """The same model, sometimes with latent attention."""
    if dice.random() > 0.15:
        return run
    widths = {"key_value_rank": dice.choice((6, 9, 16)), "rope_head_dim": dice.choice((2, 4)), "value_head_dim": 4}
    widths |= {"query_rank": dice.choice((5, 12))} if dice.random() < 0.6 else {}
    keys: Keys = {"model.attention": "latent", "model.n_kv_heads": run["model.n_heads"], "model.head_dim": 6}
    keys |= {f"model.latent.{name}": width for name, width in widths.items()}
    return {key: value for key, value in run.items() if key.removeprefix("model.") not in _NOT_OF_LATENTS} | keys


def _with_states(dice: random.Random, run: Keys) -> Keys:
    """Sometimes layers of kind delta, and a gate of the shared experts."""
    keys = _some(dice, 0.3, {"model.shared_expert_gate": "true"} if "model.n_shared_experts" in run else {})
    if dice.random() > 0.2:
        return keys
    heads = dice.choice((1, 2, 4, 6))
    widths = {"key_heads": heads, "value_heads": heads * dice.choice((1, 2)), "key_head_dim": dice.choice((3, 8))}
    widths |= {"value_head_dim": dice.choice((5, 8)), "conv_kernel": dice.choice((1, 3, 4))}
    layers = dice.choice(('["delta", "full"]', '["full", "delta"]', '["delta"]'))
    if _takes_signs(run):  # gradients across the end of a document are rounding there, no zeros
        return keys
    return keys | {"model.layers": layers} | {f"model.delta.{name}": width for name, width in widths.items()}


def _groups(dice: random.Random, run: Keys) -> Keys:
    """Sometimes two groups of experts, and both ways of balance."""
    if "model.n_experts" not in run or dice.random() > 0.3:
        return {}
    enough = int(str(run["model.experts_per_token"])) <= int(str(run["model.n_experts"])) // 2
    keys: Keys = {"model.router.n_groups": 2, "model.router.groups_per_token": 1 if enough else 2}
    keys |= {"model.router.scaling_factor": 2.5}
    return keys | _some(dice, 0.4, {"model.router.load_balance": "bias_and_auxiliary_loss"})


def _mup(dice: random.Random, run: Keys) -> Keys:
    """Sometimes another width for which the learning rate holds."""
    if dice.random() > 0.2 or run.get("model.embedding_scale") == "sqrt_dim" or "model.layers" in run:
        return {}
    keys: Keys = {"model.mup_base_dim": dice.choice((8, 16, 30, 100))}
    return keys | _some(dice, 0.4, {"model.mup_base_head_dim": dice.choice((1, 3, 16))})


def _qk_clip(dice: random.Random, run: Keys) -> Keys:
    """Sometimes a limit of the logits, which first weights are below or above."""
    has_logits = run.get("model.layers") != '["delta"]' or "model.multi_token" in run
    if "model.qk_norm" in run or not has_logits:
        return {}
    return _some(dice, 0.25, {"optimizer.qk_clip": dice.choice((1e-4, 1e-3, 0.05))})


def _average(dice: random.Random, run: Keys, is_exact: bool) -> Keys:
    """Sometimes an average of the weights; the plain reference does not round it."""
    if dice.random() > 0.3:
        return {}
    keys: Keys = {"average.last": 2} if dice.random() < 0.5 else {"average.decay": 0.5}
    keys |= {"average.interval": dice.choice((1, 1, 2))} | _some(dice, 0.3, {"average.start_step": 1})
    is_rounded = run.get("training.dtype") == "bfloat16" or dice.random() < 0.3
    return keys | ({"average.dtype": "bfloat16"} if is_exact and is_rounded else {})


def _teacher(dice: random.Random, run: Keys) -> Keys:
    """A model of another size and kind, which the meshes of `run` can split; its logits are large."""
    shared = ("model.n_layers", "model.n_heads", "model.n_kv_heads", "model.vocab_size")
    keys: Keys = {key: run[key] for key in shared} | {"model.dim": dice.choice((16, 24, 40)), "model.init_std": 0.2}
    keys |= {"model.head_dim": dice.choice((4, 8)), "model.ffn_dim": run["model.ffn_dim"]}
    keys |= {"training.seed": dice.randrange(1000)}
    keys |= _some(dice, 0.2, {"model.tie_embeddings": "true"}) | _some(dice, 0.2, {"model.window": 5})
    return keys | (_experts(dice, keys) if dice.random() < 0.2 else {})


def _data(dice: random.Random) -> Keys:
    if dice.random() < 0.6:
        return {}
    lengths = [dice.choice((2, 5, 8, 30, 100)) for _ in range(dice.choice((1, 2)))]
    sources = [
        f'{{name = "documents {i}", kind = "synthetic", document_length = {length}, weight = {i + 1}.0}}'
        for i, length in enumerate(lengths)
    ]
    keys: Keys = {"data.sources": f"[{', '.join(sources)}]"}
    return keys | _some(dice, 0.7, {"data.document_mask": "true"})


def _training(dice: random.Random, is_exact: bool) -> Keys:
    keys: Keys = {
        "training.steps": dice.choice((3, 3, 3, 3, 4)),
        "training.seq_len": dice.choice((16, 16, 16, 32, 32, 48)),
        "training.global_batch_size": dice.choice((4, 4, 4, 4, 8, 12)),
        "training.seed": dice.randrange(1000),
        "training.max_norm": dice.choice((0.05, 0.3, 0.3, 1.0, "inf")),
    }
    keys |= _some(dice, 0.3, {"training.norm_type": dice.choice((1, 3, "inf"))})
    keys |= _some(dice, 0.25, {"training.z_loss_weight": dice.choice((1e-4, 0.1))})
    if not is_exact:
        return keys | FLOAT64
    dtypes = ("float32", "bfloat16")
    kinds = (("float32",) * 3, ("float32", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16"))
    chosen = dice.choice((*kinds, *kinds, (dice.choice(dtypes),) * 3))
    keys |= {"training.reduction": "exact", "training.micro_batch_size": dice.choice((1, 1, 1, 2))}
    return keys | dict(zip(FLOAT64, chosen, strict=True))


def _optimizer(dice: random.Random, is_exact: bool) -> Keys:
    keys: Keys = {"optimizer.lr": dice.choice((1e-3, 1e-2))}
    if dice.random() < 0.4:
        keys |= {"optimizer.name": "muon"}
        keys |= _some(dice, 0.3, {"optimizer.momentum": 0.8}) | _some(dice, 0.2, {"optimizer.nesterov": "false"})
        keys |= _some(dice, 0.3, {"optimizer.orthogonalization": "polar_express"})
        keys |= _some(dice, 0.3, {"optimizer.split_heads": "true"})
        keys |= _some(dice, 0.3, {"optimizer.neuron_beta": 0.9})
        keys |= _some(dice, 0.3, {"optimizer.cautious_weight_decay": "true"})
    elif dice.random() < 0.3:
        keys |= {"optimizer.name": dice.choice(("lion", "ademamix"))}
        keys |= _some(dice, 0.3, {"optimizer.cautious_weight_decay": "true"})
    else:
        keys |= _some(dice, 0.15, {"optimizer.moments_dtype": "bfloat16"})
    keys |= _some(dice, 0.2, {"optimizer.betas": "[0.8, 0.99]"})
    # AdamW moves a weight that hardly has a gradient by the gradient's rounding times lr / eps: with 1e-8 by 1e6 times.
    keys |= {"optimizer.eps": 1e-4} if not is_exact else _some(dice, 0.2, {"optimizer.eps": 1e-6})
    keys |= _some(dice, 0.3, {"optimizer.weight_decay": dice.choice((0.0, 0.5))})
    keys |= _some(dice, 0.15, {"optimizer.weight_decay_by": "schedule"})
    if is_exact:  # the plain reference does not round
        keys |= _some(dice, 0.05, {"fsdp.owner_broadcast_dtype": "bfloat16"})
    patterns = {
        "embed_tokens.*": ("freeze = true", "freeze_until_step = 1", "lr_scale = 0.5"),
        "layers.0.*": ("freeze = true", "freeze_until_step = 2", "lr_scale = 0.1, weight_decay = 0.3"),
        "layers.*.mlp.*": ("freeze_until_step = 1", "lr_scale = 2.0"),
        "*norm.weight": ("freeze_until_step = 1", "weight_decay = 0.2"),
        "norm.weight": ("freeze = true",),
    }
    groups = {pattern: dice.choice(settings) for pattern, settings in patterns.items() if dice.random() < 0.3}
    keys |= _some(dice, 0.4, {"optimizer.groups": groups_of(groups)} if groups else {})
    name = dice.choice(("cosine", "linear", "warmup_stable_decay", "constant", "inverse_sqrt", "power"))
    keys |= {"lr_schedule.name": name, "lr_schedule.warmup_steps": dice.choice((0, 2)), "lr_schedule.total_steps": 8}
    return keys


def _stages(dice: random.Random, run: Keys) -> tuple[str, ...]:
    """Sometimes a stage or two, each of which changes some of the keys that a stage may set."""
    if dice.random() > 0.3:
        return ()
    steps = int(str(run["training.steps"]))
    begins = sorted(dice.sample(range(1, steps), dice.choice((1, 1, 2))))
    return tuple(f"{{at_step = {step}, {_stage(dice, run)}}}" for step in begins)


def _stage(dice: random.Random, run: Keys) -> str:
    """What a stage sets."""
    keys: Keys = {"training.seq_len": dice.choice((16, 32, 48))}
    keys |= _some(dice, 0.4, {"training.global_batch_size": 2 * int(str(run["training.global_batch_size"]))})
    keys |= _some(dice, 0.3, {"training.max_norm": dice.choice((0.05, 1.0))})
    keys |= _some(dice, 0.3, {"training.z_loss_weight": 0.01})
    keys |= _some(dice, 0.4, {"optimizer.lr": dice.choice((1e-3, 3e-3)), "optimizer.weight_decay": 0.2})
    keys |= _some(dice, 0.4, {"lr_schedule.name": '"linear"', "lr_schedule.total_steps": 5})
    others = '{name = "short", kind = "synthetic", document_length = 5}, {name = "windows", kind = "synthetic"}'
    kept = "" if "data.sources" in run else '{name = "synthetic", kind = "synthetic"}, '
    mixture: Keys = {"data.sources": f"[{kept}{others}]", "data.document_mask": "true"}
    is_even = "model.layers" not in run and not _takes_signs(run)  # as in `_with_states`
    keys |= _some(dice, 0.4, mixture if is_even else {})
    return ", ".join(f"{key} = {value}" for key, value in keys.items())


def _takes_signs(run: Keys) -> bool:
    """Whether the optimizer's step jumps where a gradient passes through zero."""
    return run.get("optimizer.name") == "lion" or "optimizer.cautious_weight_decay" in run


def _machine(dice: random.Random, ranks: int, run: Keys, owners: bool) -> Keys:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1}
    for factor in {1: (), 2: (2,), 3: (3,), 4: (2, 2), 8: (2, 2, 2)}[ranks]:
        axes[dice.choices(list(axes), (2, 3, 3, 3, 4))[0]] *= factor
    if owners:
        axes |= {"dp_replicate": axes["dp_replicate"] * axes["dp_shard"], "dp_shard": 1}
    keys: Keys = {f"mesh.{axis}": size for axis, size in axes.items() if size > 1 or axis == "dp_shard"}
    keys |= {"fsdp.partition": "owner"} if owners else _fsdp(dice, exact=run.get("training.reduction") == "exact")
    shards = axes["dp_replicate" if owners else "dp_shard"] * axes["cp"]
    if "model.n_experts" in run and shards > 1:
        keys |= _some(dice, 0.6, {"mesh.ep": dice.choice([n for n in (2, 3, 4, 8) if shards % n == 0])})
        buffers: Keys = {"expert.exchange": "buffers", "expert.buffer_factor": dice.choice((1.0, 1.2, 2.0, 8.0))}
        keys |= _some(dice, 0.5, buffers if keys.get("mesh.ep", 1) != 1 else {})
    if axes["cp"] > 1:
        keys["context.method"] = dice.choice(("gather", "ring", "all_to_all"))
    if axes["pp"] > 1:
        keys |= _pipeline(dice)
    keys |= _recomputation(dice, int(str(run["model.n_layers"])), keys.get("pipeline.schedule") == "zero_bubble_v")
    if "training.micro_batch_size" not in run:
        at_once = axes["dp_replicate"] * axes["dp_shard"]
        most = int(str(run["training.global_batch_size"])) // at_once
        fitting = [n for n in range(1, most + 1) if most % n == 0 and most // n >= axes["pp"]]
        keys["training.micro_batch_size"] = dice.choice(fitting[-2:] or [1])  # the fewest micro-batches
    keys |= _some(dice, 0.15, {"comm.streams": "per_group"})
    keys |= _some(dice, 0.3, {"comm.prefetch": dice.choice((0, 2, 4))})
    keys |= _some(dice, 0.1, {"metrics.fingerprint": "true"})
    keys |= _some(dice, 0.1, {"attention.backend": "flash2"})
    if dice.random() < 0.1:  # what is recomputed is chosen, too
        keys = {key: value for key, value in keys.items() if not key.startswith("activation_checkpoint.")}
        keys |= {key: value for key, value in AUTO.items() if key not in run}
    return keys


def _fsdp(dice: random.Random, exact: bool) -> Keys:
    keys: Keys = _some(dice, 0.4, {"fsdp.zero_stage": dice.choice((1, 2))})
    if not keys:
        keys = _some(dice, 0.4, {"fsdp.reshard_after_forward": dice.choice(("always", "never"))})
        keys |= {} if exact else _some(dice, 0.4, {"fsdp.accumulate": "reduce_last"})
    return keys


def _pipeline(dice: random.Random) -> Keys:
    schedule = dice.choice(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v"))
    keys: Keys = {"pipeline.schedule": schedule}
    if schedule == "interleaved_1f1b":
        keys |= _some(dice, 0.2, {"pipeline.stages_per_rank": 3})
    return keys


def _recomputation(dice: random.Random, n_layers: int, once: bool) -> Keys:
    mode = dice.choice(("none", "full", "full" if once else "selective"))
    keys: Keys = {"activation_checkpoint.mode": mode}
    if mode == "none":
        return {}
    keys |= _some(dice, 0.2, {"activation_checkpoint.every_nth_layer": 2} if n_layers > 1 else {})
    keys |= _some(dice, 0.2, {"activation_checkpoint.layers": f'"0-{n_layers // 2}"'} if n_layers > 2 else {})
    return keys | (_some(dice, 0.3, {"activation_checkpoint.save_every_nth_matmul": 2}) if mode == "selective" else {})


def _some(dice: random.Random, probability: float, keys: Keys) -> Keys:
    """The keys, with a probability."""
    return keys if dice.random() < probability else {}
