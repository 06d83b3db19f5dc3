"""Mistakes that happened in real projects, as changes of Keel's own code in the process of a rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from configs.plan import routers_of
from models.rotary import RotaryEmbedding
from parallelisms import expert, fsdp, grad_norm, init, parallelize, passes, pipeline, tensor, tensor_whole
from parallelisms.attention import context
from parallelisms.grad_norm import gradients
from parallelisms.load_balance import LoadBalance
from parallelisms.owner_partition import OwnerPartition
from parallelisms.passes import Call, OneByOne
from parallelisms.pipeline import Pipeline
from parallelisms.ranks import local_part
from parallelisms.sums.fast import Sums
from scripts import parity_compare
from trainer import loss, step
from trainer.step import Learner

Plant = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Mistake:
    """A mistake, where it happened, and what the proof must say."""

    plant: Plant
    source: str
    on: tuple[str, ...]
    """The techniques on which it shows."""
    named: str
    """The first wrong tensor that the proof names; "loss" or "gradient norm" where no tensor is wrong at first."""
    job: str = "dense"
    shows_in_loss: bool = False
    """Whether the first step's loss is wrong, too."""


# --------------------------------------------------------------------------- tensor parallelism


@contextmanager
def terms_of_a_replicated_weight_are_not_added() -> Iterator[None]:
    cut = tensor._cut_parameter

    def without_sum(*arguments: Any) -> None:
        with patch.object(tensor, "Partial", Replicate):
            cut(*arguments)

    with patch.object(tensor, "_cut_parameter", without_sum):
        yield


class _LocalNorm(ParallelStyle):
    """A norm on a part of the sequence, whose weight's gradient stays that of the part."""

    def _apply(self, module: Any, mesh: Any) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate()]))

        def forward(x: Any) -> Any:
            weight = module.weight.to_local(grad_placements=[Replicate()])
            return F.rms_norm(local_part(x), module.normalized_shape, weight, module.eps)

        module.forward = forward
        return module


def norm_gradients_stay_local() -> AbstractContextManager:
    return patch.dict(tensor._STYLES, {"norm": _LocalNorm})


@contextmanager
def gradient_of_the_hidden_states_is_one_ranks() -> Iterator[None]:
    prepare = tensor._Head._prepare

    def labelled_as_whole(*arguments: Any) -> Any:
        with patch.object(tensor, "Partial", Replicate):
            return prepare(*arguments)

    with patch.object(tensor._Head, "_prepare", labelled_as_whole):
        yield


@contextmanager
def gradient_of_the_experts_input_is_one_ranks() -> Iterator[None]:
    def apply(_self: Any, module: Any, mesh: Any) -> nn.Module:
        forward = module.forward

        def on_parts(x: Any) -> tuple:
            whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
            part, *others = forward(whole.redistribute(placements=[Replicate()]).to_local())
            summed = DTensor.from_local(part, mesh, [Partial()], run_check=False)
            return summed.redistribute(placements=[Shard(1)]).to_local(), *others

        module.forward = on_parts
        return module

    with patch.object(tensor._Parts, "_apply", apply):
        yield


def log_partition_is_of_the_own_rows() -> AbstractContextManager:
    return patch.object(loss, "_over_group", lambda measured, _group: measured)


class _RankZero:
    """`torch.distributed` as rank 0 sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, _group: Any = None) -> int:
        return 0


def targets_are_counted_from_the_first_rank() -> AbstractContextManager:
    return patch.object(loss, "dist", _RankZero())


def replicas_count_several_times_in_the_norm() -> AbstractContextManager:
    def all_groups(gradient: Any) -> tuple:
        if not isinstance(gradient, DTensor):
            return ()
        mesh = gradient.device_mesh
        return tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)

    return patch.object(grad_norm, "sharding_groups", all_groups)


def other_ranks_shards_miss_in_the_norm() -> AbstractContextManager:
    return patch.object(grad_norm, "sharding_groups", lambda _gradient: ())


@contextmanager
def _balance_scaled(factor: Callable[[Any], float]) -> Iterator[None]:
    apply = parallelize.apply_load_balance

    def scaled(model: Any, mesh: Any, config: Any) -> None:
        apply(model, mesh, config)
        for router in routers_of(model).values():
            router.balance_scale *= factor(mesh.sizes)

    with patch.object(parallelize, "apply_load_balance", scaled):
        yield


@contextmanager
def load_is_counted_per_part_of_a_sequence() -> Iterator[None]:
    apply = parallelize.apply_load_balance

    def without_sum(model: Any, mesh: Any, config: Any) -> None:
        apply(model, mesh, config)
        for router in routers_of(model).values():
            router.sum_over_sequence = lambda counts: counts

    with patch.object(parallelize, "apply_load_balance", without_sum):
        yield


@contextmanager
def output_in_flight_enters_a_compiled_block() -> Iterator[None]:
    apply = tensor.RowwiseParallel._apply
    with patch.object(tensor._Embedding, "_apply", lambda self, module, mesh: apply(self, module, mesh)):
        yield


# --------------------------------------------------------------------------- data parallelism


def gradients_are_averaged_over_ranks_too() -> AbstractContextManager:
    return patch.object(fsdp, "_add_up_gradients", lambda _group: None)


@contextmanager
def _after_preparing_backward(change: Callable[[FSDPModule], None]) -> Iterator[None]:
    prepare = passes.prepare_backward

    def changed(model: Any, *arguments: Any) -> None:
        prepare(model, *arguments)
        change(model)

    with patch.object(passes, "prepare_backward", changed):
        yield


@contextmanager
def every_rank_draws_the_first_shard() -> Iterator[None]:
    indices = init.local_indices

    def first(parameter: Any) -> list:
        return [torch.arange(len(each)) for each in indices(parameter)]

    with patch.object(init, "local_indices", first):
        yield


def gradients_are_reduced_in_less_precision() -> AbstractContextManager:
    def policy(**settings: Any) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**(settings | {"reduce_dtype": torch.float32}))

    return patch.object(fsdp, "MixedPrecisionPolicy", policy)


def norm_is_of_the_own_shards() -> AbstractContextManager:
    def of_own(_self: Any, parameters: Any, *_: Any) -> Any:
        return torch.stack([local_part(gradient).norm() for gradient in gradients(parameters)]).norm()

    return patch.object(Sums, "grad_norm", of_own)


def loss_is_divided_by_the_own_tokens() -> AbstractContextManager:
    def own(self: Any, micro_batches: Any) -> Any:
        count = torch.tensor(float(step._count_valid(micro_batches)), dtype=torch.float64)
        return count * self.mesh.sizes.dp

    return patch.object(Learner, "_valid_tokens", own)


@contextmanager
def all_ranks_read_the_same_samples() -> Iterator[None]:
    steps_through = parity_compare.steps_through

    def of_rank_zero(stages: Any, _rank: int, *others: Any) -> Any:
        return steps_through(stages, 0, *others)

    with patch.object(parity_compare, "steps_through", of_rank_zero):
        yield


def tokens_of_an_expert_are_counted_per_rank() -> AbstractContextManager:
    return patch.object(LoadBalance, "_summed", lambda self: self._counts)


@contextmanager
def _frequencies(change: Callable[[Any], Any]) -> Iterator[None]:
    fill = RotaryEmbedding.init_buffers

    def changed(self: Any) -> None:
        fill(self)
        if dist.get_world_size() > 1:
            self.inv_freq = change(self.inv_freq)

    with patch.object(RotaryEmbedding, "init_buffers", changed):
        yield


def parameters_are_not_sent_by_their_owners() -> AbstractContextManager:
    return patch.object(OwnerPartition, "_send", lambda _self, _parameters: None)


# --------------------------------------------------------------------------- context parallelism


@contextmanager
def _parts(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    shard = step.shard_batch
    with patch.object(step, "shard_batch", lambda batch, mesh, method: change(batch, shard(batch, mesh, method))):
        yield


def _positions_from_zero(_whole: Any, part: Any) -> Any:
    return replace(part, positions=torch.arange(part.tokens.shape[1])[None])


@contextmanager
def sequences_are_cut_in_one_piece() -> Iterator[None]:
    shard = step.shard_batch
    with patch.object(step, "shard_batch", lambda batch, mesh, _method: shard(batch, mesh, "all_to_all")):
        yield


@contextmanager
def gradients_are_scaled_by_the_parts_of_a_sequence() -> Iterator[None]:
    train = OneByOne.train

    def scaled(self: Any, calls: Any, scale: Any) -> Any:
        return train(self, calls, scale * self.config.mesh.cp)

    with patch.object(OneByOne, "train", scaled):
        yield


def gradients_of_keys_stay_where_they_are_computed() -> AbstractContextManager:
    return patch.object(context._Gather, "given_back", lambda self: self._by_source[self._group.rank()])


def ring_forgets_the_sum_so_far() -> AbstractContextManager:
    def give_back(self: Any, _source: int, gradient: Any) -> None:
        if self._sum is not None:
            self._sum()
        self._sum = self._pass_on(gradient)

    return patch.object(context._Ring, "give_back", give_back)


def later_keys_are_seen() -> AbstractContextManager:
    return patch.object(context._Ranks, "visible", lambda self, _source: (self.all, self.all))


def blocks_are_averaged_without_their_partition() -> AbstractContextManager:
    def merge(out: Any, logsumexp: Any, more: Any, _logsumexp: Any) -> None:
        out += more
        out /= 2

    return patch.object(context, "merge_", merge)


def documents_are_forgotten_between_ranks() -> AbstractContextManager:
    return patch.object(context._Ranks, "documents", lambda *_: None)


# --------------------------------------------------------------------------- pipelines


@contextmanager
def pipelines_loss_is_divided_after_backward() -> Iterator[None]:
    train = Pipeline.train

    def unscaled(self: Any, calls: Any, scale: Any) -> Any:
        return train(self, calls, torch.ones_like(scale))

    with patch.object(Pipeline, "train", unscaled):
        yield


def schedule_divides_by_micro_batches() -> AbstractContextManager:
    def schedule(stages: Any, **settings: Any) -> Any:
        return Schedule1F1B(stages[0], **(settings | {"scale_grads": True}))

    return patch.dict(pipeline._SCHEDULES, {"1f1b": schedule})


@contextmanager
def all_micro_batches_have_the_documents_of_the_first() -> Iterator[None]:
    train = Pipeline.train

    def of_first(self: Any, calls: Any, scale: Any) -> Any:
        first = {"documents": calls[0].arguments["documents"], "positions": calls[0].arguments["positions"]}
        return train(self, [Call(call.tokens, call.arguments | first) for call in calls], scale)

    with patch.object(Pipeline, "train", of_first):
        yield


# --------------------------------------------------------------------------- experts


@contextmanager
def experts_gradients_are_divided_by_fewer_ranks() -> Iterator[None]:
    train = OneByOne.train

    def scaled(self: Any, calls: Any, scale: Any) -> Any:
        return train(self, calls, scale * dist.get_world_size())

    with gradients_are_averaged_over_ranks_too(), patch.object(OneByOne, "train", scaled):
        yield


@contextmanager
def weights_of_the_choice_have_one_ranks_gradient() -> Iterator[None]:
    experts = tensor_whole.STYLES["whole_experts"]

    def without_sum(module: Any, mesh: Any) -> None:
        term = module.forward
        experts(module, mesh)

        def forward(hidden: Any, chosen: Any, weights: Any) -> Any:
            return tensor_whole._Total.apply(term(tensor_whole._Same.apply(hidden, mesh), chosen, weights), mesh)

        module.forward = forward

    with patch.dict(tensor_whole.STYLES, {"whole_experts": without_sum}):
        yield


def gate_and_up_are_taken_as_they_are_stored() -> AbstractContextManager:
    return patch.object(tensor_whole, "_repacked", lambda part, *_: part)


@contextmanager
def weights_of_the_choice_are_detached() -> Iterator[None]:
    apply = parallelize.apply_expert_parallel

    def detached(model: Any, *arguments: Any) -> None:
        apply(model, *arguments)
        for router in routers_of(model).values():
            router.forward = partial(_detached, router.forward)  # type: ignore[attr-defined]

    with patch.object(parallelize, "apply_expert_parallel", detached):
        yield


def _detached(forward: Callable, x: Any) -> Any:
    choice = forward(x)
    return choice._replace(weights=choice.weights.detach())


@contextmanager
def rows_come_back_in_the_order_of_arrival() -> Iterator[None]:
    send = expert._send

    def in_order_of_arrival(rows: Any, sizes: Any, by_expert: Any, as_arrived: Any, group: str) -> Any:
        same = torch.arange(len(by_expert))
        return send(rows, sizes, same, same, group)

    with patch.object(expert, "_send", in_order_of_arrival):
        yield


# --------------------------------------------------------------------------- accumulation


@contextmanager
def _one_by_one(change: Callable[..., Any]) -> Iterator[None]:
    train = OneByOne.train
    with patch.object(OneByOne, "train", lambda self, calls, scale: change(partial(train, self), self, calls, scale)):
        yield


def _zeroed_before_each(train: Any, self: Any, calls: Any, scale: Any) -> Any:
    losses = []
    for call in calls:
        self.model.zero_grad()
        losses.append(train([call], scale))
    return torch.cat(losses)


def _divided_twice(train: Any, _self: Any, calls: Any, scale: Any) -> Any:
    return train(calls, scale / len(calls))


def _mean_of_means(train: Any, _self: Any, calls: Any, scale: Any) -> Any:
    counts = [int((call.arguments["loss"].keywords["targets"] >= 0).sum()) for call in calls]
    mean = sum(counts) / len(counts)
    return torch.cat([train([call], scale * mean / n) for call, n in zip(calls, counts, strict=True)])


@contextmanager
def evaluation_is_divided_by_the_micro_batches() -> Iterator[None]:
    evaluate = Learner.evaluate

    def divided(self: Any, micro_batches: Any, token_bytes: Any) -> Any:
        sums = evaluate(self, micro_batches, token_bytes)
        return sums / sums.new_tensor([len(micro_batches), 1, 1])

    with patch.object(Learner, "evaluate", divided):
        yield


# --------------------------------------------------------------------------- all of them

HEAD = "lm_head.weight"
ROUTER = "layers.1.mlp.router.weight"

MISTAKES = {
    "terms of a head's norm are not added": Mistake(
        terms_of_a_replicated_weight_are_not_added,
        "Megatron-LM 7452, finding 11; transformers' replicated_with_grad_allreduce left out",
        ("TP 2",),
        "layers.1.self_attn.k_norm.weight",
        job="norms",
    ),
    "terms of a router are not added": Mistake(
        terms_of_a_replicated_weight_are_not_added, "Automodel 2995; Megatron-LM 7452", ("TP 2",), ROUTER, job="experts"
    ),
    "a norm's gradient stays that of a part of the sequence": Mistake(
        norm_gradients_stay_local, "Megatron-LM 1446; gpt-neox 1259", ("TP 2",), "norm.weight"
    ),
    "the loss's gradient of the hidden states is one rank's": Mistake(
        gradient_of_the_hidden_states_is_one_ranks, "torchtitan 3412; SkyRL 1886", ("TP 2",), "norm.weight"
    ),
    "the gradient of the experts' input is one rank's": Mistake(
        gradient_of_the_experts_input_is_one_ranks,
        "torchtitan 3386; Megatron-LM 7452",
        ("TP 2",),
        "layers.1.post_attention_layernorm.weight",
        job="experts",
    ),
    "the log-partition is of the own rows": Mistake(
        log_partition_is_of_the_own_rows, "torchtune 2641", ("TP 2",), HEAD, shows_in_loss=True
    ),
    "targets are counted from the first rank": Mistake(
        targets_are_counted_from_the_first_rank,
        "vocabulary-parallel loss over the wrong group",
        ("TP 2",),
        HEAD,
        shows_in_loss=True,
    ),
    "replicas count several times in the norm": Mistake(
        replicas_count_several_times_in_the_norm,
        "Transformer Engine (ROCm) 715: norm off by 1.36 to 1.52",
        ("TP 2",),
        "gradient norm",
    ),
    "other ranks' shards miss in the norm": Mistake(
        other_ranks_shards_miss_in_the_norm, "Megatron-LM 7452, finding 8; 5916", ("TP 2",), "gradient norm"
    ),
    "the auxiliary loss grows with tensor parallelism": Mistake(
        partial(_balance_scaled, lambda sizes: sizes.tp), "Megatron-LM 5047", ("TP 2",), ROUTER, "experts"
    ),
    "an output in flight enters a compiled block": Mistake(
        output_in_flight_enters_a_compiled_block,
        "torch 2.13 (CONTRIBUTING.md): the embedding's gradient is zero",
        ("FSDP 2", "TP 2", "compile"),
        "embed_tokens.weight",
    ),
    "gradients are summed by a loss and averaged by FSDP": Mistake(
        gradients_are_averaged_over_ranks_too, "torchtitan 2972", ("FSDP 2",), HEAD
    ),
    "every rank draws the first shard": Mistake(
        every_rank_draws_the_first_shard,
        "torch: in-place initialization of shards (CONTRIBUTING.md)",
        ("FSDP 2",),
        "embed_tokens.weight",
        shows_in_loss=True,
    ),
    "gradients are reduced in less precision": Mistake(
        gradients_are_reduced_in_less_precision, "Megatron-Bridge 5411", ("FSDP 2",), HEAD
    ),
    "clipping uses the norm of the own shards": Mistake(
        norm_is_of_the_own_shards, "torchtune 2420", ("FSDP 2",), "gradient norm"
    ),
    "each rank divides by its own tokens": Mistake(
        loss_is_divided_by_the_own_tokens,
        "transformers 34191; mlx-lm 1544",
        ("FSDP 2", "documents"),
        HEAD,
        shows_in_loss=True,
    ),
    "the auxiliary loss shrinks with data parallelism": Mistake(
        partial(_balance_scaled, lambda sizes: 1 / sizes.dp), "Automodel 1412", ("FSDP 2",), ROUTER, "experts"
    ),
    "tokens of an expert are counted per rank": Mistake(
        tokens_of_an_expert_are_counted_per_rank, "torchtitan 4154", ("FSDP 2",), "layers.0.mlp.router.bias", "bias"
    ),
    "buffers stay empty after the meta device": Mistake(
        partial(_frequencies, torch.zeros_like),
        "torchtitan 3775: loss 11.08 for 3.63",
        ("FSDP 2",),
        "rotary.inv_freq",
        shows_in_loss=True,
    ),
    "the model's cast rounds the rotary frequencies": Mistake(
        partial(_frequencies, lambda frequencies: frequencies.bfloat16().float()),
        "torchtitan 4117; transformers' rotary buffers in bfloat16",
        ("FSDP 2",),
        "rotary.inv_freq",
        shows_in_loss=True,
    ),
    "replicas are not reduced": Mistake(
        partial(_after_preparing_backward, lambda model: model.set_requires_all_reduce(False)),
        "no_sync left on for the last micro-batch",
        ("DDP 2",),
        HEAD,
    ),
    "shards are reduced, replicas are not": Mistake(
        partial(_after_preparing_backward, lambda model: model.set_requires_all_reduce(False)),
        "HSDP without its all-reduce",
        ("HSDP 2x2",),
        HEAD,
    ),
    "all ranks read the same samples": Mistake(
        all_ranks_read_the_same_samples, "a sampler without its rank", ("DDP 2",), HEAD, shows_in_loss=True
    ),
    "gathered parameters are kept over an update": Mistake(
        partial(_after_preparing_backward, lambda model: model.set_reshard_after_backward(False)),
        "ZeRO stages 1 and 2 with stale parameters",
        ("ZeRO 1",),
        "loss",
    ),
    "owners do not send what they update": Mistake(
        parameters_are_not_sent_by_their_owners,
        "ZeRO-1 by owner without its broadcast",
        ("owner 2",),
        "embed_tokens.weight",
    ),
    "positions begin at zero on each rank": Mistake(
        partial(_parts, _positions_from_zero),
        "Megatron-LM 560; sglang 28463",
        ("CP 2 gather",),
        HEAD,
        shows_in_loss=True,
    ),
    "sequences are cut in one piece, masks in two": Mistake(
        sequences_are_cut_in_one_piece, "slime 73; pytorch 152261", ("CP 2 gather",), HEAD, shows_in_loss=True
    ),
    "gradients are scaled by the parts of a sequence": Mistake(
        gradients_are_scaled_by_the_parts_of_a_sequence,
        "Megatron-LM 673, 906, 3959",
        ("CP 2 gather",),
        HEAD,
    ),
    "gradients of keys stay where they are computed": Mistake(
        gradients_of_keys_stay_where_they_are_computed,
        "Megatron-LM 1464",
        ("CP 2 gather",),
        "layers.1.self_attn.v_proj.weight",
    ),
    "the ring forgets the sum so far": Mistake(
        ring_forgets_the_sum_so_far, "Megatron-LM 1464", ("CP 2 ring",), "layers.1.self_attn.v_proj.weight"
    ),
    "later keys are seen": Mistake(
        later_keys_are_seen, "a causal mask per rank", ("CP 2 gather",), HEAD, shows_in_loss=True
    ),
    "blocks are averaged without their partition": Mistake(
        blocks_are_averaged_without_their_partition,
        "torch: logsumexp of the CPU's kernel",
        ("CP 2 ring",),
        HEAD,
        shows_in_loss=True,
    ),
    "documents are forgotten between ranks": Mistake(
        documents_are_forgotten_between_ranks,
        "packed sequences and CP",
        ("CP 2 gather", "documents"),
        HEAD,
        shows_in_loss=True,
    ),
    "load is counted per part of a sequence": Mistake(
        load_is_counted_per_part_of_a_sequence, "Megatron-LM 5047, 7452", ("CP 2 gather",), ROUTER, "experts"
    ),
    "the pipeline's loss is divided after backward": Mistake(
        pipelines_loss_is_divided_after_backward, "torchtitan 4194, 2972", ("PP 2 1f1b",), HEAD
    ),
    "the schedule divides by micro-batches": Mistake(
        schedule_divides_by_micro_batches, "torchtitan 1732, 1733", ("PP 2 1f1b",), HEAD
    ),
    "all micro-batches have the documents of the first": Mistake(
        all_micro_batches_have_the_documents_of_the_first,
        "masks of a pipeline",
        ("PP 2 1f1b", "documents"),
        HEAD,
        shows_in_loss=True,
    ),
    "experts' gradients are divided by fewer ranks": Mistake(
        experts_gradients_are_divided_by_fewer_ranks,
        "pytorch 160285; Megatron-LM 5956; megablocks 20; DeepSpeed 5259",
        ("EP 2",),
        "layers.1.mlp.experts.down_proj",
        job="experts",
    ),
    "gradients of Hugging Face's experts are divided by fewer ranks": Mistake(
        experts_gradients_are_divided_by_fewer_ranks,
        "pytorch 160285; Megatron-LM 5956; megablocks 20; DeepSpeed 5259",
        ("EP 2",),
        "model.layers.1.mlp.experts.down_proj",
        job="mixtral",
    ),
    "rows reach others of Hugging Face's experts": Mistake(
        rows_come_back_in_the_order_of_arrival,
        "gloo's all-to-all into another order",
        ("EP 2",),
        "lm_head.weight",
        job="mixtral",
        shows_in_loss=True,
    ),
    "a split expert's weight has one rank's gradient": Mistake(
        weights_of_the_choice_have_one_ranks_gradient,
        "Automodel 2995; torchtitan 4154",
        ("TP 2",),
        "model.layers.1.post_attention_layernorm.weight",
        job="mixtral",
    ),
    "a packed matrix is split as it is stored": Mistake(
        gate_and_up_are_taken_as_they_are_stored,
        "transformers' packed_colwise for a plain colwise",
        ("TP 2",),
        "lm_head.weight",
        job="mixtral",
        shows_in_loss=True,
    ),
    "the router learns nothing of the loss": Mistake(
        weights_of_the_choice_are_detached, "Automodel 2995", ("EP 2",), ROUTER, "experts"
    ),
    "rows reach other experts": Mistake(
        rows_come_back_in_the_order_of_arrival,
        "gloo's all-to-all into another order",
        ("EP 2",),
        HEAD,
        "experts",
        shows_in_loss=True,
    ),
    "gradients are zeroed before each micro-batch": Mistake(
        partial(_one_by_one, _zeroed_before_each), "OpenNMT-py 526", ("accumulation",), HEAD
    ),
    "accumulated gradients are divided twice": Mistake(
        partial(_one_by_one, _divided_twice), "transformers 35203; torchtitan 1732", ("accumulation",), HEAD
    ),
    "each micro-batch divides by its own tokens": Mistake(
        partial(_one_by_one, _mean_of_means), "transformers 34191; verl 3332", ("accumulation", "documents"), HEAD
    ),
    "an evaluation is divided by its micro-batches": Mistake(
        evaluation_is_divided_by_the_micro_batches, "torchtitan 1759, 4167", ("accumulation",), "loss"
    ),
}
