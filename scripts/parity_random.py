"""Draws jobs and meshes at random for the parity table, and shrinks those that go wrong.

A *draw* is a number of ranks and config overrides: run keys, which the reference has as well, and machine keys. On its
way it may evaluate a batch between two steps, and move to another mesh by a checkpoint. Half of the draws compute in
float64 and must agree with the plain reference (`parity_reference.py`) to 1e-10; the other half, with
`training.reduction = "exact"`, must have the bits of the smallest mesh that these promise to equal. The weights that
are compared are the last step's, and their average, if one is kept.

A draw is a function of its seed and number alone. What the config refuses is no fault; what it accepts must train, and
to the right values. A fault is shrunk: its keys are left out one by one, as long as it remains.
"""

import random
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.manifest import step_folder
from configs.errors import ConfigError
from configs.load import find_job_file, load
from configs.reading.overrides import words
from configs.reading.toml_text import value_text
from configs.schema import BY_CONTENT, further_run_keys, is_run_key
from scripts.parity_rows import AUTO, BOUNDS, DECIDE_BITS, groups_of

if TYPE_CHECKING:
    from scripts.rank_pool import RankPool

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


@dataclass(frozen=True)
class Outcome:
    """A draw's outcome."""

    refused: str = ""
    """The config's reason for refusing it, without its numbers and names."""
    reason: str = ""
    """All of that reason."""
    fault: str = ""
    """The fault that was found; empty if there is none."""
    trace: str = ""
    """Where it came from, of a crash."""
    is_lost: bool = False
    """Whether a rank's process ended by a signal."""


# --------------------------------------------------------------------------- drawing


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


# --------------------------------------------------------------------------- trying


def attempt(pool: "RankPool", config_name: str, drawn: Draw) -> Outcome:
    """Train a draw and its reference, and compare."""
    from scripts.rank_pool import RankLost
    from trainer.planning.unknown_names import require_known_names

    try:
        with tempfile.TemporaryDirectory() as folder:
            drawn = _with_teacher(pool, config_name, drawn, Path(folder))
            job = _job_file(config_name, drawn.stages, Path(folder))
            for keys in (drawn.keys, _after_move(drawn)):
                require_known_names(load(job, words(keys), world_size=drawn.ranks))
            return Outcome(fault=_fault(pool, job, drawn, Path(folder)))
    except ConfigError as error:
        return Outcome(refused=_kind(str(error).splitlines()[0]), reason=str(error))
    except RuntimeError as error:  # of a rank, with its traceback
        last = str(error).strip().splitlines()[-1]
        if last.startswith("configs.errors."):
            return Outcome(refused=_kind(last), reason=last.removeprefix("configs.errors."))
        return Outcome(fault=f"crash: {last}", trace=str(error), is_lost=isinstance(error, RankLost))


def _job_file(config_name: str, stages: Sequence[str], folder: Path) -> str:
    """The job file with stages of its own, which no command line sets."""
    if not stages:
        return config_name
    job = folder / "job.toml"
    base = value_text(str(find_job_file(config_name).absolute()))
    job.write_text(f"base = {base}\nstages = [{', '.join(stages)}]\n")
    return str(job)


def _with_teacher(pool: "RankPool", config_name: str, drawn: Draw, folder: Path) -> Draw:
    """The draw with the teacher, which is written in `folder`, in its keys."""
    if not drawn.teacher:
        return drawn
    from scripts.parity_compare import write_teacher

    pool.run(1, write_teacher, config_name, words(drawn.teacher | FLOAT64), str(folder))
    return replace(drawn, keys=drawn.keys | {"distillation.teacher": value_text(str(step_folder(folder, 1)))})


def _after_move(drawn: Draw) -> Keys:
    return drawn.run | drawn.moved if drawn.move_at else drawn.keys


def _fault(pool: "RankPool", config_name: str, drawn: Draw, folder: Path) -> str:
    """The difference from the reference; empty if there is none."""
    from scripts.parity_compare import Detour, bits, compare
    from scripts.parity_reference import reference

    detour = Detour(drawn.evaluate_at, drawn.move_at, words(_after_move(drawn)), str(folder / "checkpoints"))
    if drawn.is_exact:
        ranks, keys = _same_bits(drawn)
        expected = pool.run(ranks, bits, config_name, words(keys))[0]
        found = pool.run(drawn.ranks, bits, config_name, words(drawn.keys), detour)[0]
        return "" if found == expected else f"other bits than on {ranks} rank{'s' * (ranks > 1)}"
    path = str(folder / "reference.pt")
    pool.run(1, reference, config_name, words(drawn.run), path)
    difference = pool.run(drawn.ranks, compare, config_name, words(drawn.keys), path, detour)[0]
    if difference.passes("float64"):
        return ""
    names = ("loss", "norm", "gradient", "weights")
    figures = [f"{name} {value:.1e}" for name, value in zip(names, difference.values, strict=True)]
    return f"more than {BOUNDS['float64'][0]:.0e} from the reference: {', '.join(figures)}"


def _same_bits(drawn: Draw) -> tuple[int, Keys]:
    """The smallest mesh that has the same bits: its ranks, and the overrides."""
    keys = drawn.run | {key: value for key, value in drawn.keys.items() if key in DECISIVE}
    cp, tp, ep = (int(str(keys.get(f"mesh.{axis}", 1))) for axis in ("cp", "tp", "ep"))
    data_ranks = max(1, ep // cp)
    is_by_owner = keys.get("fsdp.partition") == "owner"
    keys |= {"mesh.dp_replicate": data_ranks, "mesh.dp_shard": 1} if is_by_owner else {"mesh.dp_shard": data_ranks}
    return cp * tp * data_ranks, keys


def _kind(reason: str) -> str:
    """A message without its numbers, so that those of one rule are equal."""
    return re.sub(r"\d+(\.\d+)?", "N", reason.removeprefix("configs.errors.").split(";")[0])[:110]


# --------------------------------------------------------------------------- shrinking


def shrunk(pool: "RankPool", config_name: str, drawn: Draw, seconds: float = 600.0) -> Draw:
    """Leave out one thing after another, as long as the draw still goes wrong.

    Stops after `seconds` with the smallest draw found, since ranks that hang take minutes to fail.
    """
    end = time.monotonic() + seconds
    before = None
    while drawn != before:
        before = drawn
        for part in _parts(drawn):
            if time.monotonic() > end:
                return drawn
            smaller = _less(drawn, *part)
            if smaller != drawn and attempt(pool, config_name, smaller).fault:
                drawn = smaller
    return drawn


def _parts(drawn: Draw) -> list[tuple[str, str]]:
    """The parts that can be left out: a field, and a key of it."""
    kept = {"training.reduction", *(() if drawn.is_exact else FLOAT64)}
    keys = [("keys", key) for key in drawn.keys if key not in kept]
    stages = [("stages", stage) for stage in drawn.stages]
    taught = [("teacher", key) for key in ("", *drawn.teacher)] if drawn.teacher else []
    return [("move_at", ""), ("evaluate_at", ""), *taught, *stages, *keys, *(("moved", key) for key in drawn.moved)]


def _less(drawn: Draw, where: str, key: str) -> Draw:
    if where == "move_at":
        return replace(drawn, move_at=0, moved={})
    if where == "evaluate_at":
        return replace(drawn, evaluate_at=())
    if (where, key) == ("teacher", ""):
        untaught = {name: value for name, value in drawn.keys.items() if not name.startswith("distillation.")}
        return replace(drawn, keys=untaught, teacher={})
    if where == "stages":
        return replace(drawn, stages=tuple(stage for stage in drawn.stages if stage != key))
    kept: Any = {name: value for name, value in getattr(drawn, where).items() if name != key}
    return replace(drawn, **{where: kept})


# --------------------------------------------------------------------------- many


_TIMES_LOST = 1
"""Times that a rank may be lost and its job is tried once more (see `RankLost`): one in some 10,000 jobs."""


def run_random(config_name: str, jobs: int, seed: int) -> int:
    """Try the draws of a seed, print what goes wrong and how to repeat it; returns 1 if anything did, otherwise 0."""
    from scripts.rank_pool import RankPool

    started = time.perf_counter()
    reasons = Counter[str]()
    wrong = 0
    times_lost = 0
    print(f"{jobs} jobs of seed {seed}")
    with closing(RankPool(size=8)) as pool:
        for number in range(jobs):
            drawn = draw(seed, number)
            outcome = attempt(pool, config_name, drawn)
            if outcome.is_lost and times_lost < _TIMES_LOST:
                times_lost += 1
                print(f"job {number}: {outcome.fault}\n    {drawn.command(config_name)}\n{outcome.trace}", flush=True)
                print("  tried once more:", flush=True)
                outcome = attempt(pool, config_name, drawn)
            if outcome.fault:
                wrong += 1
                print(f"job {number}: {outcome.fault}\n    {drawn.command(config_name)}\n{outcome.trace}", flush=True)
                print(f"  shrunk:\n    {shrunk(pool, config_name, drawn).command(config_name)}", flush=True)
            reasons.update([outcome.refused] if outcome.refused else [])
            if (number + 1) % 10 == 0 or number + 1 == jobs:
                seconds = (time.perf_counter() - started) / (number + 1)
                print(f"{number + 1} jobs: {reasons.total()} refused, {wrong} wrong, {seconds:.1f} s each", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5d} refused: {reason}")
    return min(wrong, 1)


def require_steps(config_name: str, drawn: Draw) -> None:
    """Check that a job goes on until it moves and is evaluated; of one that the config refuses, `attempt` says so.

    Raises:
        ConfigError: it ends before.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            job = _job_file(config_name, drawn.stages, Path(folder))
            steps = load(job, words(drawn.keys), world_size=drawn.ranks).config.training.steps
    except ConfigError:
        return
    if drawn.move_at > steps:
        raise ConfigError(f"--move-at {drawn.move_at}: the job ends after {steps} steps; name one of them")
    if late := [step for step in drawn.evaluate_at if step >= steps]:
        raise ConfigError(f"--evaluate-at {late[0]}: a step must follow, and the job has {steps}; name an earlier one")


def run_one(config_name: str, drawn: Draw) -> int:
    """Try one draw and print its outcome; returns 1 if it is wrong, otherwise 0."""
    from scripts.rank_pool import RankPool

    with closing(RankPool(size=drawn.ranks)) as pool:
        outcome = attempt(pool, config_name, drawn)
    print(outcome.fault or (f"refused: {outcome.reason}" if outcome.refused else "right"))
    return 1 if outcome.fault else 0
