"""The reference of the parity table: the same training in plain PyTorch, written independently of the trainer.

It uses one process in eager mode, whole batches and logits, each masked document separately, a second implementation of
expert balancing and of float8 matmuls, and torch's own clipping and AdamW. For moments in bfloat16, which torch's AdamW
cannot round, it has a second implementation in numpy. Only float8 matmuls see one micro-batch after the other, since
their scales are over a micro-batch.
"""

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from configs.load import load
from configs.own_code import code_of, is_import_path
from configs.plan import Plan, plan_of
from configs.run_stages import Border, RunStage, steps_of_stages
from configs.schema import Average, Config, Optimizer, ParameterGroup
from models import build_model
from parallelisms.init import materialize
from scripts.parity_float8 import in_8_bits
from scripts.parity_further import FurtherTokens
from scripts.parity_logits import LargestLogits
from scripts.parity_teacher import plain_teacher, taught_loss
from trainer.data.fork import forked_position
from trainer.data.loader import IGNORED, MicroBatch, build_loader
from trainer.data.order import Start
from trainer.lr_schedule import learning_rate_of
from trainer.optimizers.from_torch import TorchRule
from trainer.optimizers.rule import rule_of


@dataclass
class Trajectory:
    """The results of a run of a few steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    """Losses of an evaluation without gradients, by the number of steps before it, of the next step's batch."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """Weights and buffers before the first step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the last step, and their average, if the job keeps one: "average of NAME"."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers after the last step."""
    stopped: str = ""
    """Why it ended before its last step; "" if it did not."""


def reference(config_name: str, overrides: tuple[str, ...], path: str) -> None:
    """Train in plain PyTorch, in one process and eager mode, and write the trajectory to `path`."""
    torch.save(vars(plain_trajectory(config_name, overrides)), path)


def plain_trajectory(config_name: str, overrides: tuple[str, ...], nudge: float = 0.0, draw: int = 0) -> Trajectory:
    """Train in plain PyTorch, in one process and eager mode.

    Args:
        config_name, overrides: the job.
        nudge: share by which each initial value is moved, up or down.
        draw: seed of the directions.
    """
    job = load(config_name, overrides, world_size=1)
    config = job.config
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    materialize(model, torch.device("cpu"), config.training.seed)
    directions = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters() if nudge else ():
            parameter.mul_(1.0 + nudge * (2 * torch.randint(2, parameter.shape, generator=directions) - 1))
    if config.float8.recipe != "none":
        in_8_bits(model, config.float8)
    teacher = plain_teacher(config)
    parameters = dict(model.named_parameters())
    optimizers = _plain_optimizers(config, parameters, plan_of(model))
    found = Trajectory(initial=copied(parameters | buffers_of([model])))
    averaged: list[dict[str, Tensor]] = []
    for step, (stage, micro_batches) in enumerate(steps_through(job.stages, 0, 1)):
        if stage.config != config:
            config = stage.config
            _begin_stage(config, optimizers, parameters)
        for name, p in model.named_parameters():
            p.requires_grad_(not _rests(config.optimizer, name, step))
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        document_ids = [ids for batch in micro_batches if (ids := batch.document_ids) is not None]
        choices = _Choices(model, config)
        limit = config.optimizer.qk_clip
        largest_logits = LargestLogits(model) if limit else None
        further = FurtherTokens(model, config)
        ids = torch.cat(document_ids) if document_ids else None
        if config.float8.recipe != "none" and ids is None:
            logits = torch.cat([model(batch.tokens) for batch in micro_batches])
        else:
            logits = _logits(model, tokens, ids)
        loss = _loss(config, logits.flatten(0, 1), targets.flatten())
        squares = logits.logsumexp(-1)[targets != IGNORED].square()
        whole = taught_loss(config, loss, logits, _logits(teacher, tokens, ids), targets) if teacher else loss
        whole = whole + config.training.z_loss_weight * squares.mean()
        whole = whole + further.loss(tokens, targets, ids, partial(_total, config))
        (whole + choices.auxiliary_loss(tokens.shape)).backward()
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm, config.training.norm_type)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_of(stage, step + 1) * group["lr_scale"]
            optimizer.step()
        if limit and largest_logits:
            largest_logits.clip(limit)
            largest_logits.stop()
        choices.finish_step()
        averaged = _averaged(config.average, averaged, parameters, step + 1)
        model.zero_grad()
        found.losses.append(loss.item())
        found.evaluations[step] = loss.item()
        found.norms.append(norm.item())
    found.weights = {name: p.detach() for name, p in model.named_parameters()}
    for name in parameters if averaged else ():
        found.weights[f"average of {name}"] = torch.stack([each[name] for each in averaged]).mean(0)
    found.buffers = buffers_of([model])
    return found


def _averaged(
    average: Average, before: list[dict[str, Tensor]], weights: Mapping[str, Tensor], number: int
) -> list[dict[str, Tensor]]:
    """What the average of the weights is the mean of, after step `number`: copies, or the exponential average alone."""
    after = number - average.start_step
    if not average.interval or after <= 0 or after % average.interval:
        return before
    if average.last or not before:
        return [*before, copied(weights)][-max(1, average.last) :]
    (kept,) = before
    return [
        {name: average.decay * kept[name] + (1 - average.decay) * weight.detach() for name, weight in weights.items()}
    ]


def _begin_stage(
    config: Config, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Set what a stage may change of the optimizers' groups, each of which has one parameter."""
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            (parameter,) = group["params"]
            group.update(_group_settings(config, names[parameter], parameter, isinstance(optimizer, _Muon)))


def _loss(config: Config, logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the valid tokens; logits: (tokens, vocab)."""
    if not is_import_path(config.training.loss):
        return F.cross_entropy(logits, targets)
    is_valid = targets != IGNORED
    return code_of(config.training.loss)(logits[is_valid], targets[is_valid]).mean()


def _total(config: Config, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss summed over the valid tokens, with the z-loss; logits: (tokens, vocab)."""
    is_valid = targets != IGNORED
    if not is_valid.any():
        return logits.sum() * 0
    z_loss = config.training.z_loss_weight * logits[is_valid].logsumexp(-1).square().sum()
    return _loss(config, logits, targets) * is_valid.sum() + z_loss


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors, without gradients."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def buffers_of(models: Iterable[torch.nn.Module]) -> dict[str, Tensor]:
    """The buffers of a model or of its stages, by name, without what its routers and attention modules note.

    Notes are of the tokens that a rank has seen, and a step ends by taking and zeroing them.
    """
    found: dict[str, Tensor] = {}
    for model in models:
        plan = plan_of(model)
        counters = {f"{name}.tokens_per_expert" for name in (*plan.routers, *plan.counters)}
        counters |= {f"{router}.entropy" for router in plan.routers}
        counters |= {f"{attention}.attend.largest" for attention in plan.attention}
        found |= {name: buffer for name, buffer in model.named_buffers() if name not in counters}
    return found


class _Choices:
    """A second, plain implementation of what each router does with a global batch."""

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        """Observe the routers; create it before the forward pass."""
        self.inputs: dict[Any, list[Tensor]] = {
            router: [] for router in map(model.get_submodule, plan_of(model).routers)
        }
        self.tokens: dict[Any, Tensor] = {}
        self.hooks = [
            router.register_forward_hook(lambda router, inputs, _: self.inputs[router].append(inputs[0]))
            for router in self.inputs
        ]

    def auxiliary_loss(self, shape: torch.Size) -> Tensor | float:
        """weight * sum over layers of the mean over sequences of sum over experts of f * P.

        Args:
            shape: (sequences, tokens); the forward pass may have seen them in parts, in this order.
        """
        for hook in self.hooks:
            hook.remove()
        total: Tensor | float = 0.0
        for router, parts in self.inputs.items():
            x = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, shape)
            shares, chosen = self._shares_and_choice(router, x)
            self.tokens[router] = chosen.sum(dim=(0, 1))
            f = chosen.mean(dim=1) * chosen.shape[2] / router.experts_per_token
            if router.frequency is not None:
                f = router.frequency
            if router.settings.has_auxiliary_loss:
                loss = (f * shares.mean(dim=1)).sum(dim=1).mean()
                total = total + router.settings.auxiliary_loss_weight * loss
        return total

    def finish_step(self) -> None:
        """Raise the bias of experts with fewer tokens than the mean, lower the others, and keep the load for the next
        step's loss; call after `auxiliary_loss`."""
        for router, tokens in self.tokens.items():
            if router.frequency is not None:
                router.frequency = tokens / tokens.sum() * len(tokens)
            if router.bias is not None:
                fewer = tokens < tokens.mean()
                more = tokens > tokens.mean()
                router.bias[fewer] += router.settings.bias_update_rate
                router.bias[more] -= router.settings.bias_update_rate

    def _shares_and_choice(self, router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both (sequences, tokens, experts): shares of the scores, and 1 where an expert was chosen, else 0."""
        logits = x @ router.weight.T
        scores = logits.softmax(-1) if router.settings.scoring == "softmax" else logits.sigmoid()
        preference = scores if router.bias is None else scores + router.bias
        settings = router.settings
        if settings.n_groups:
            groups = preference.unflatten(2, (settings.n_groups, -1))
            order = groups.sort(3, descending=True).values[..., :2].sum(3).argsort(2, descending=True)
            for group in order[..., settings.groups_per_token :].unbind(2):  # of each token, one that is not chosen
                groups = groups.scatter(2, group[..., None, None].expand_as(groups[:, :, :1]), -torch.inf)
            preference = groups.flatten(2)
        chosen = torch.zeros_like(scores).scatter(
            2, preference.argsort(2, descending=True)[..., : router.experts_per_token], 1.0
        )
        return scores / scores.sum(2, keepdim=True), chosen


class _Plain(torch.optim.Optimizer):
    """An optimizer by its formulas, one parameter after the other."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": config.lr, "eps": config.eps})
        self.config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class _Lion(_Plain):
    """Lion, by the paper's formulas."""

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = self.config.betas
        momentum = state.get("momentum", torch.zeros_like(p))
        direction = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
        p -= group["lr"] * (direction + _decay(self.config, group, p, direction))
        state["momentum"] = beta2 * momentum + (1 - beta2) * gradient


class _AdEMAMix(_Plain):
    """AdEMAMix, by the paper's formulas."""

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        config = self.config
        beta1, beta2 = config.betas
        warmup = config.slow_warmup_steps
        state["t"] = t = state.get("t", 0) + 1
        beta3 = config.slow_beta
        alpha = config.slow_weight
        if t < warmup:
            alpha *= t / warmup
            # Of f(beta) = ln(beta) / ln(0.5), the inverse of the half-life.
            beta3 = 2 ** -(1 / ((1 - t / warmup) / -np.log2(beta1) + t / warmup / -np.log2(config.slow_beta)))
        state["m1"] = beta1 * state.get("m1", 0.0) + (1 - beta1) * gradient
        state["m2"] = beta3 * state.get("m2", 0.0) + (1 - beta3) * gradient
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient**2
        mean = state["m1"] / (1 - beta1**t) + alpha * state["m2"]
        update = mean / ((state["v"] / (1 - beta2**t)).sqrt() + group["eps"])
        p -= group["lr"] * (update + _decay(config, group, p, update))


_POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
"""Appendix of the paper."""


def _decay(config: Optimizer, group: dict[str, Any], weight: Tensor, update: Tensor) -> Tensor:
    """The weight decay of a step, by the learning rate."""
    is_outward = (weight * update < 0) & config.cautious_weight_decay
    return group["weight_decay"] * torch.where(is_outward, 0.0, weight)


class _Muon(_Plain):
    """Muon by its formulas, one matrix after the other; torch's own code orthogonalizes."""

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta = self.config.momentum
        momentum = beta * state.get("momentum", torch.zeros_like(p)) + (1 - beta) * gradient
        state["momentum"] = momentum
        direction = (1 - beta) * gradient + beta * momentum if self.config.nesterov else momentum
        shape = (-1, group["rows"] or p.shape[-2], p.shape[-1])
        for number, (weight, towards) in enumerate(zip(p.view(shape), direction.view(shape), strict=True)):
            update = self._orthogonal(towards).to(p.dtype)
            if self.config.neuron_beta is None:
                update *= 0.2 * max(weight.shape) ** 0.5
            else:
                update = self._normalized(update, state, f"rows of {number}")
            weight -= group["lr"] * (update + _decay(self.config, group, weight, update))

    def _normalized(self, update: Tensor, state: dict[str, Any], key: str) -> Tensor:
        """NorMuon's lines 7 to 10 (Li et al. 2025, algorithm 1)."""
        beta = self.config.neuron_beta
        assert beta is not None
        state[key] = beta * state.get(key, 0.0) + (1 - beta) * (update**2).mean(1)
        normalized = update / (state[key].sqrt() + self.config.eps)[:, None]
        # An expert that has never had a token does not move.
        return normalized * 0.2 * update.numel() ** 0.5 / normalized.norm().clamp(min=1e-7)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        if self.config.orthogonalization == "newton_schulz":
            return _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        x = matrix.bfloat16()
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / (x.norm() * 1.01).clamp(min=1e-7)  # a gradient of round-off alone gives no direction
        for coefficients in _POLAR_EXPRESS:
            a, b, c = (each / 1.01**power for each, power in zip(coefficients, (1, 3, 5), strict=True))
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if matrix.shape[0] > matrix.shape[1] else x


class _RoundingAdamW(_Plain):
    """AdamW whose moments are stored in bfloat16, rounded by keyed hashes; formulas of `trainer/kernels/keyed.py`."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer, keys: dict[Tensor, str]) -> None:
        super().__init__(groups, config)
        self.keys = keys

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = self.config.betas
        weight = p.numpy()
        state["t"] = t = state.get("t", 0) + 1
        m = beta1 * state.get("m", 0.0) + (1 - beta1) * gradient.numpy()
        v = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient.numpy() ** 2
        step = group["lr"] * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + group["eps"])
        weight -= group["lr"] * group["weight_decay"] * weight + step
        hashes = _hashes(self.keys[p], t, p.numel()).reshape(p.shape)
        state["m"] = _rounded(m, hashes & 0xFFFF).astype(weight.dtype)
        state["v"] = _rounded(v, hashes >> 16).astype(weight.dtype)


def _hashes(key: str, step: int, n: int) -> np.ndarray:
    """The hash of each of a parameter's elements, (n,) uint32."""
    word = xxhash.xxh3_64_intdigest(key.encode())
    low, high, t = (np.array([each], dtype=np.uint32) for each in (word & 0xFFFFFFFF, word >> 32, step))
    golden = np.uint32(0x9E3779B9)
    salt = _mix(low ^ t * golden)
    numbers = np.arange(n, dtype=np.uint64)
    within = numbers.astype(np.uint32)
    beyond = (numbers >> np.uint64(32)).astype(np.uint32)
    return _mix(_mix(within ^ salt) ^ (beyond * golden + _mix(high ^ salt)))


def _mix(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _rounded(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    pattern = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) + bits.astype(np.uint32)
    return (pattern & np.uint32(0xFFFF0000)).view(np.float32)


def _plain_optimizers(
    job: Config, parameters: dict[str, torch.nn.Parameter], plan: Plan
) -> list[torch.optim.Optimizer]:
    """Build torch's AdamW, preceded by Muon for the matrices in the blocks if the config names it, experts included."""
    config = job.optimizer
    if is_import_path(config.name):  # the user's own rule, or a class of torch optimizers, over whole parameters
        own = [{"params": [p], "freeze": False, **_group_settings(job, name, p)} for name, p in parameters.items()]
        rule = rule_of(config.name)(config)
        return [rule.instance(own) if isinstance(rule, TorchRule) else rule.build(own)]
    of_experts = tuple(f"{module}." for module in plan.experts)
    in_blocks = tuple(f"{block}." for block in (*plan.blocks, *plan.further_blocks))
    is_muons = {
        name: config.name == "muon"
        and name.startswith(in_blocks)
        and p.ndim == 2 + name.startswith(of_experts)
        and not name.endswith("_conv")
        for name, p in parameters.items()
    }
    groups: list[dict[str, Any]] = [
        {"params": [p], **_group_settings(job, name, p)} for name, p in parameters.items() if not is_muons[name]
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if config.name == "muon":
        muons = [
            {"params": [p], "rows": _rows_of_a_head(job, n), **_group_settings(job, n, p, is_muons=True)}
            for n, p in parameters.items()
            if is_muons[n]
        ]
        optimizers = [_Muon(muons, config)]
    if config.moments_dtype == "bfloat16":
        keys: dict[Tensor, str] = {p: f"{job.training.seed}/{name}/moments" for name, p in parameters.items()}
        return [_RoundingAdamW(groups, config, keys)]
    if config.name == "ademamix":
        return [_AdEMAMix(groups, config)]
    if config.name == "lion":
        return [_Lion(groups, config)]
    betas = (config.betas[0], config.betas[1])
    adamw = torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=False, foreach=False)
    return [*optimizers, adamw]


def _rows_of_a_head(job: Config, name: str) -> int:
    """The rows that are updated as one matrix, where heads are split; 0: all."""
    is_of_heads = any(f".{each}_proj." in name for each in "qkv")
    head_dim = job.model.head_dim or job.model.dim // job.model.n_heads
    return head_dim if job.optimizer.split_heads and is_of_heads else 0


def _group_of(config: Optimizer, name: str) -> ParameterGroup:
    """The first group that a parameter belongs to, or one without settings."""
    groups = [group for group in config.groups if fnmatch.fnmatchcase(name, group.pattern)]
    return groups[0] if groups else ParameterGroup(pattern="*")


def _group_settings(job: Config, name: str, parameter: Tensor, is_muons: bool = False) -> dict[str, float]:
    """A parameter's weight decay and the factor of its learning rate."""
    config = job.optimizer
    group = _group_of(config, name)
    decay = config.weight_decay if parameter.ndim >= 2 else 0.0
    decay = decay if group.weight_decay is None else group.weight_decay
    if config.weight_decay_by == "schedule":  # torch multiplies it by the group's learning rate
        decay = decay / config.lr / group.lr_scale if group.lr_scale else 0.0
    of_width = _of_width(job, name, parameter, is_muons)
    settings = {"lr_scale": group.lr_scale * of_width, "weight_decay": decay / of_width}
    base = getattr(job.model, "mup_base_dim", None)
    if base is None or _has_fixed_rows(name):
        return settings
    return settings | {"eps": config.eps * base / job.model.dim}


def _has_fixed_rows(name: str) -> bool:
    """Whether a matrix maps a width to a number that stays: of experts, or one."""
    return ".router." in name or ".shared_expert_gate." in name


def _of_width(job: Config, name: str, parameter: Tensor, is_muons: bool) -> float:
    """muP's factor on a learning rate; for Muon, the spectral norm that an update should have by the one it has."""
    base = getattr(job.model, "mup_base_dim", None)
    if base is None or parameter.ndim < 2 or not name.startswith(("layers.", "multi_token.")):
        return 1.0
    model: Any = job.model
    ratio = base / model.dim
    if not is_muons:
        return ratio
    rows, columns = parameter.shape[-2:]
    base_rows = rows * (1 if _has_fixed_rows(name) else ratio)
    if rows_of_a_head := _rows_of_a_head(job, name):
        rows = rows_of_a_head
        base_rows = model.mup_base_head_dim or rows

    def share(rows: float, columns: float) -> float:
        return (rows / columns / max(rows, columns)) ** 0.5

    return share(rows, columns) / share(base_rows, columns * ratio)


def _rests(config: Optimizer, name: str, step: int) -> bool:
    """Whether a parameter is frozen in the step after `step` steps."""
    group = _group_of(config, name)
    return group.freeze or group.freeze_until_step > step


def _logits(model: Callable[[Tensor], Tensor], tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    return model(tokens) if document_ids is None else each_document_alone(model, tokens, document_ids)


def each_document_alone(model: Callable[[Tensor], Tensor], tokens: Tensor, document_ids: Tensor) -> Tensor:
    """Compute the logits that a document mask must give, without a mask; `model` maps tokens to logits."""
    rows = []
    for row, ids in zip(tokens, document_ids, strict=True):
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        rows.append(torch.cat([model(document[None]) for document in row.split(lengths)], dim=1))
    return torch.cat(rows)


def batches(config: Config, dp_rank: int, dp_size: int) -> Iterable[list[MicroBatch]]:
    """The micro-batches of each step of a run without stages."""
    return (micro_batches for _, micro_batches in steps_through([RunStage(Border(), config)], dp_rank, dp_size))


def steps_through(
    stages: Sequence[RunStage], dp_rank: int, dp_size: int, after: int = 0
) -> Iterator[tuple[RunStage, list[MicroBatch]]]:
    """The stage and the micro-batches of each step of a run after the first `after` steps."""
    sample = 0
    position: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for stage, n_steps in zip(stages, steps_of_stages(stages, stages[0].config.training.steps), strict=True):
        config = stage.config
        batch_size = config.training.global_batch_size
        skipped = min(n_steps, max(0, after - stage.border.after))
        position = position and forked_position(position, before, config)
        start = Start(**position.get("start", {}))
        with closing(build_loader(config, dp_rank, dp_size, sample + skipped * batch_size, start=start)) as loader:
            yield from ((stage, micro_batches) for micro_batches in itertools.islice(loader, n_steps - skipped))
            sample += n_steps * batch_size
            position = loader.state_dict() | {"next_sample": sample}
        before = config.model_dump(mode="json")
