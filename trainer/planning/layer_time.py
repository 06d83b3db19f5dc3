"""How long a layer takes for a micro-batch: its products, attention, elementwise kernels, and what it waits for.

A matrix product takes its FLOPs at the rate of products, or its bytes at the rate of memory. Attention has a rate by
kernel, head size and length; the recurrence of Gated DeltaNet has one by kernel. All other kernels move bytes, counted
per token. Collectives of tensor, context and expert parallelism stand between these, so that all of their time shows.
In backward, a layer first repeats what activation checkpointing did not keep.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from configs.architectures.llama_keys import (
    Delta,
    delta_of,
    expert_dim,
    has_gate,
    is_delta,
    is_mixture,
    latent_of,
    window_of,
)
from configs.architectures.parts import head_dim, n_kv_heads
from configs.delta import passes_states
from configs.layout import MeshSizes, attention_features, buffer_factor, mixed_elements
from configs.schema import Config, is_described
from parallelisms.activation_checkpoint import resolve_ops, selected_layers
from parallelisms.attention.delta import computes_by_kernels
from parallelisms.attention.halo import largest_halo
from trainer.planning.devices import Device, Network
from trainer.planning.flops import tokens_seen
from trainer.planning.memory import RankMemory
from trainer.planning.skeleton import Shape
from trainer.planning.states import BYTES

Seconds = dict[str, float]
"""Seconds by part."""

RAMP = 4e-6
"""Seconds in which a product's first and last tiles leave multiprocessors idle, and the gap to the next kernel;
measured on an H100 as what small products take beyond their FLOPs."""
_ROUTE = 150e-6
"""Seconds that a device idles at an exchange of expert parallelism, whose sizes the host must read first."""


_WITH_STATES = 1.5
"""Products of a layer of kind delta that also finds what its tokens make of a state, to those of one that does not: by
count, for heads of 128 in chunks of 64."""


@dataclass(frozen=True)
class _Moved:
    """Bytes that elementwise kernels move for a token in a layer, in bfloat16: per unit of a width."""

    stream: tuple[int, int]
    """Bytes of the forward and the backward pass, per feature of the residual stream."""
    heads: tuple[int, int]
    """The same per feature of queries, and of keys."""
    delta: tuple[int, int]
    """The same per feature that a layer of kind delta projects to: convolution, gates and norm, in place of `heads`."""
    inner: tuple[int, int]
    """The same per inner feature of the feed-forward."""


_COMPILED = _Moved(stream=(18, 108), heads=(4, 0), delta=(19, 53), inner=(6, 24))
_EAGER = _Moved(stream=(25, 51), heads=(44, 46), delta=(66, 135), inner=(18, 18))
_LOGIT_BYTES = 7
"""Bytes moved for each logit."""
_ROW_BYTES = 28
"""Bytes moved per feature of a row that is sorted to its expert and back, forward and backward."""


def added(*all_seconds: Seconds) -> Seconds:
    """The seconds of several pieces of work, part by part."""
    total: Seconds = defaultdict(float)
    for seconds in all_seconds:
        for part, each in seconds.items():
            total[part] += each
    return total


@dataclass(frozen=True)
class Matrix:
    """A product of a layer on one rank: (rows, inputs) times (inputs, outputs)."""

    name: str
    experts: float
    """Number of matrices of this size that share the rows; without experts 1."""
    rows: float
    inputs: float
    outputs: float
    is_float8: bool
    is_grouped: bool
    is_frozen: bool


@dataclass(frozen=True)
class LayerTime:
    """The layers of one rank of the pipeline, or of any rank without a pipeline."""

    config: Config
    sizes: MeshSizes
    device: Device
    gpus_per_host: int
    place: int

    @cached_property
    def memory(self) -> RankMemory:
        return RankMemory(self.config, self.sizes, self.device.type, self.place)

    @property
    def network(self) -> Network:
        return Network(self.device, self.gpus_per_host)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank, of which tensor-parallel ranks share the work."""
        return self.memory.tokens

    # ------------------------------------------------------------------------- work of a layer

    def matrices(self, layer: int) -> Iterator[Matrix]:
        """The products of a layer's forward pass, in order."""
        model = self.memory.model
        for name in model.of_block(layer):
            shape = model.shapes[name]
            is_filter = name.rpartition(".")[0] in model.plan.recurrent
            if len(shape) > 1 and not is_filter:
                yield self._matrix(name, shape)

    def _matrix(self, name: str, shape: Shape) -> Matrix:
        rows: float = self.tokens
        outputs: float = shape[-2]
        inputs: float = shape[-1]
        experts: float = 1
        if len(shape) > 2:
            rows *= self.config.model.experts_per_token or 1
            experts = shape[0] / self.sizes.ep
        cut = self.memory.model.tp_dimension(name)
        if cut is None:
            rows /= self.sizes.tp
        elif cut == -1:
            inputs /= self.sizes.tp
        else:
            outputs /= self.sizes.tp
        is_float8 = name in self.memory.in_float8
        return Matrix(name, experts, rows, inputs, outputs, is_float8, len(shape) > 2, name in self.memory.frozen)

    def _product(self, matrix: Matrix, in_float8: bool) -> float:
        """Seconds of one product; the gradients' have the same size."""
        device = self.device
        rate = device.grouped if matrix.is_grouped else device.products
        if in_float8:
            rate *= device.products_float8 / device.products
        weights = matrix.experts * matrix.inputs * matrix.outputs
        moved = self.memory.compute_bytes * (matrix.rows * (matrix.inputs + matrix.outputs) + weights)
        return max(2 * matrix.rows * matrix.inputs * matrix.outputs / rate, moved / device.memory) + RAMP

    def _forward_products(self, layer: int, names: Sequence[str] | None = None) -> float:
        return sum(
            self._product(each, each.is_float8) for each in self.matrices(layer) if names is None or each.name in names
        )

    def _backward_products(self, layer: int) -> float:
        weights_in_float8 = self.config.float8.recipe != "rowwise_with_gw_hp"
        return sum(
            self._product(each, each.is_float8)
            + (0 if each.is_frozen else self._product(each, each.is_float8 and weights_in_float8))
            for each in self.matrices(layer)
        )

    def _shared_experts(self, layer: int, kind: str) -> float:
        """Seconds of a layer's shared experts in a pass."""
        names = [each.name for each in self.matrices(layer) if ".shared_experts." in each.name]
        return self._forward_products(layer, names) * (2 if kind == "backward" else 1)

    def _casts(self, layer: int) -> tuple[float, float]:
        """Seconds in which operands become float8: a pass for the scale and one for the cast, forward and backward."""
        chosen = [each for each in self.matrices(layer) if each.is_float8]
        of_weights = 0 if self.config.float8.fsdp_all_gather else 5
        forward = backward = 0.0
        for each in chosen:
            weights = of_weights * each.experts * each.inputs * each.outputs
            forward += 5 * each.rows * each.inputs + weights
            # Experts' weights have other scales for the gradient.
            backward += each.rows * (5 * each.outputs + 3 * each.inputs) + (weights if each.is_grouped else 0)
        return forward / self.device.memory, backward / self.device.memory

    def mixing(self, layer: int) -> tuple[str, float, float]:
        """What mixes the tokens in a layer, and its seconds forward and backward."""
        if is_delta(self.config.model, layer):
            return "Gated DeltaNet", *self._delta(layer)
        return "attention", *self._attention(layer)

    def _delta(self, layer: int) -> tuple[float, float]:
        operations = 2 * mixed_elements(self.config.model, layer, 0) * self.tokens / self.sizes.tp
        forward, backward = self.device.delta["fla" if self.has_delta_kernels else "torch"]
        if passes_states(self.config):
            operations *= _WITH_STATES
        return operations / forward, 2 * operations / backward

    @cached_property
    def has_delta_kernels(self) -> bool:
        """Whether kernels compute the layers of kind delta; a plan tries none, and takes "auto" for "torch"."""
        return computes_by_kernels(self.config, torch.device(self.device.type), tries=False)

    def _attention(self, layer: int) -> tuple[float, float]:
        """The backward pass has 2.5 times the operations."""
        model = self.config.model
        if not model.n_heads:
            return 0.0, 0.0
        seen = tokens_seen(model, layer, self.config.training.seq_len)
        operations = attention_features(model) * seen * self.tokens / self.sizes.tp
        kernel = "flash2" if self.config.attention.backend in ("flash2", "flex") else "cudnn"
        forward, backward = self.device.attention_rates(kernel, head_dim(model), seen)
        notes_logits = self.config.optimizer.qk_clip is not None  # one more product of the two, in the forward pass
        ahead = operations * (1.5 if notes_logits else 1.0) / forward
        return ahead + 2 * RAMP, 2.5 * operations / backward + 2 * RAMP

    def elementwise(self, layer: int) -> tuple[float, float]:
        """Seconds of a layer's other kernels, forward and backward."""
        model = self.config.model
        moved = _COMPILED if self.config.compile.enable else _EAGER
        mixed = self._projected(layer)
        rows, inner = self.inner(layer)
        tokens = self.tokens / self.sizes.tp * self._wider
        of_mixed = moved.delta if is_delta(model, layer) else moved.heads
        both = [
            tokens * (stream * model.dim + of_feature * mixed + of_inner * inner)
            for stream, of_feature, of_inner in zip(moved.stream, of_mixed, moved.inner, strict=True)
        ]
        routed = tokens * rows * _ROW_BYTES / 2 * model.dim
        forward, backward = ((each + routed) / self.device.memory for each in both)
        return forward, backward

    @property
    def _wider(self) -> float:
        """Bytes of an element relative to those of bfloat16, for which bytes of kernels are counted."""
        return self.memory.compute_bytes / BYTES["bfloat16"]

    def _projected(self, layer: int) -> int:
        """Features of queries and keys; in a layer of kind delta also of values and gates."""
        model = self.config.model
        if delta := delta_of(model, layer):
            return 2 * delta.keys + 2 * delta.values
        return (model.n_heads + n_kv_heads(model)) * head_dim(model)

    def inner(self, layer: int) -> tuple[int, int]:
        """Experts that a token is sent to, and the inner features of all feed-forwards that compute it."""
        model = self.config.model
        if not is_described(model):
            shapes = [self.memory.model.shapes[name] for name in self.memory.model.of_block(layer)]
            return 0, max(max(shape[-2:]) for shape in shapes if len(shape) > 1)
        if not is_mixture(model, layer):
            return 0, model.ffn_dim if has_gate(model.activation) else model.ffn_dim * 2 // 3
        return model.experts_per_token, (model.experts_per_token + model.n_shared_experts) * expert_dim(model)

    # ------------------------------------------------------------------------- collectives of a layer

    def _tensor_parallel(self, layer: int) -> list[tuple[str, float]]:
        """The collectives of a layer's forward pass over `tp`: op and bytes, in order."""
        if self.sizes.tp == 1:
            return []
        plan = self.memory.model.plan
        block = f"{plan.blocks[layer - plan.first_block]}."
        model = self.config.model
        latent = latent_of(model) if is_described(model) else None
        unit = self.tokens * self.memory.compute_bytes
        found: list[tuple[str, float]] = []
        for name, role in plan.tensor_parallel.items():
            if not name.startswith(block):
                continue
            shape = self.memory.model.shapes.get(f"{name}.weight", (model.dim, model.dim))
            if role in ("gather", "parts", "gather_column"):
                found.append(("all_gather", unit * (shape[-1] if role == "gather_column" else model.dim)))
            if role == "gather_parts" and latent:
                found.append(("all_gather", unit * latent.rope_head_dim))
            if role in ("row", "parts"):
                found.append(("reduce_scatter", unit * model.dim))
        return found

    def _expert_parallel(self, layer: int) -> list[tuple[str, float]]:
        """The exchanges of a layer's forward pass over `ep`."""
        model = self.config.model
        if self.sizes.ep == 1 or not is_described(model) or not is_mixture(model, layer):
            return []
        row = model.dim * self.memory.compute_bytes
        sent = (buffer_factor(self.config.expert) or 1.0) * self.tokens * model.experts_per_token * row
        return [("all_to_all", sent)] * 2

    def _context_parallel(self, layer: int) -> list[tuple[str, float]]:
        """What a layer exchanges over `cp` in its forward pass to mix tokens."""
        cp = self.sizes.cp
        model = self.config.model
        if cp == 1:
            return []
        if delta := delta_of(model, layer):
            return self._of_states(delta)
        width = head_dim(model) * self.memory.compute_bytes / self.sizes.tp
        if self.config.context.method == "all_to_all":
            return [("all_to_all", 2 * self.tokens * (model.n_heads + n_kv_heads(model)) * width)]
        if window := window_of(model, layer):
            sequences = self.tokens * cp // self.config.training.seq_len
            taken = sequences * largest_halo(cp, self.config.training.seq_len // cp, window - 1)
            return [("all_to_all", 2 * taken * n_kv_heads(model) * width)]
        return [("all_gather", 2 * self.tokens * cp * n_kv_heads(model) * width)]  # a ring passes on as much

    def _of_states(self, delta: Delta) -> list[tuple[str, float]]:
        """The exchanges over `cp` of a layer of kind delta; parallelisms/attention/recurrent.py has both ways."""
        cp = self.sizes.cp
        rows = (2 * delta.keys + delta.values + 2 * delta.value_heads) * self.memory.compute_bytes / self.sizes.tp
        if not passes_states(self.config):
            out = delta.values * self.memory.compute_bytes / self.sizes.tp
            return [("all_to_all", self.tokens * rows), ("all_to_all", self.tokens * out)]
        sequences = self.tokens * cp / self.config.training.seq_len
        tails = 2 * (delta.conv_kernel - 1)
        matrices = delta.key_head_dim * (delta.key_head_dim + delta.value_head_dim)
        state = delta.value_heads * matrices * max(4, self.memory.compute_bytes) / self.sizes.tp
        return [("all_to_all", sequences * tails * rows), ("all_to_all", sequences * (2 * cp - 1) * state)]

    def _noted_keys(self, layer: int) -> list[tuple[str, str, float]]:
        """What QK-clip gathers over `cp` to find a layer's largest logits, beside what attention does."""
        model = self.config.model
        if self.config.optimizer.qk_clip is None or self.sizes.cp == 1 or is_delta(model, layer):
            return []
        width = head_dim(model) * self.memory.compute_bytes / self.sizes.tp
        return [("cp", "all_gather", self.tokens * self.sizes.cp * n_kv_heads(model) * width)]

    def sums_of_whole(self, names: Sequence[str]) -> list[tuple[str, str, float]]:
        """The sums over `tp` of gradients, of matrices that each rank has whole and multiplies some tokens with."""
        if self.sizes.tp == 1:
            return []
        memory = self.memory
        whole = (name for name in names if memory.model.tp_dimension(name) is None)
        shapes = [memory.model.shapes[name] for name in whole if name not in memory.frozen]
        return [("tp", "all_reduce", prod(shape) * memory.compute_bytes) for shape in shapes if len(shape) > 1]

    def between(self, layer: int, kind: str) -> list[tuple[str, str, float]]:
        """The collectives that a layer waits for in a pass ("forward", "backward", "repeated"): axis, op, bytes."""
        by_axis = {
            "tp": self._tensor_parallel(layer),
            "ep": self._expert_parallel(layer),
            "cp": self._context_parallel(layer),
        }
        found = [(axis, op, n_bytes) for axis, each in by_axis.items() for op, n_bytes in each]
        if kind == "forward":
            return found + self._noted_keys(layer)
        if kind == "backward":
            other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
            return [(axis, other.get(op, op), n_bytes) for axis, op, n_bytes in found] + self.sums_of_whole(
                self.memory.model.of_block(layer)
            )
        if not self.repeats(layer):
            return []
        kept = self._kept
        again = [each for each in found if each[1] != "reduce_scatter" or "reduce_scatter" not in kept]
        last = [each for each in again if each[1] == "reduce_scatter"][-1:]  # a recomputation ends before it
        if last:
            again.remove(last[0])
        # The op of attention gathers keys and values itself; what is exchanged before and after an op is repeated.
        return [each for each in again if each[:2] != ("cp", "all_gather") or "attention" not in kept]

    def _exposed(self, layer: int, kind: str, beside: Seconds) -> Seconds:
        """Seconds of the collectives in a pass of a layer that nothing hides."""
        found: Seconds = defaultdict(float)
        for axis, op, n_bytes in self.between(layer, kind):
            ranks, stride = self.axis(axis)
            found[axis] += self.network.seconds(op, n_bytes, ranks, stride)
            if axis == "tp" and op != "all_reduce":
                found["elementwise"] += 2 * n_bytes / self.device.memory  # it is cut and joined along the sequence
            if axis == "ep" and kind != "backward" and self.config.expert.exchange == "uneven":
                found[axis] += _ROUTE / 2
        if self.config.comm.async_tp and found["tp"] and self.sizes.tp <= self.gpus_per_host:  # else it is off
            found["tp"] = max(found["tp"] / self.sizes.tp, found["tp"] - beside["products"])
        if self.config.expert.exchange == "buffers" and found["ep"]:
            found["ep"] -= min(found["ep"] / 2, self._shared_experts(layer, kind))  # of two exchanges, beside the first
        goes_around = self.config.context.method == "ring" and not window_of(self.config.model, layer)
        if goes_around and found["cp"] and "attention" in beside:
            found["cp"] = max(0.0, found["cp"] - beside["attention"])
        return found

    def axis(self, axis: str) -> tuple[int, int]:
        """Ranks along an axis, and how far apart they are: tp is innermost, then cp, dp_shard, dp_replicate, pp."""
        sizes = self.sizes
        return {
            "tp": (sizes.tp, 1),
            "cp": (sizes.cp, sizes.tp),
            "ep": (sizes.ep, sizes.tp),
            "shard": (sizes.fsdp_shard, sizes.tp),
            "expert_shard": (sizes.expert_shard, sizes.tp * sizes.ep),
            "replicas": (sizes.replicas, sizes.tp * sizes.fsdp_shard),
            "expert_replicas": (sizes.expert_replicas, sizes.tp * sizes.ep * sizes.expert_shard),
            "pp": (sizes.pp, sizes.stage_ranks),
        }[axis]

    # ------------------------------------------------------------------------- recomputation

    @cached_property
    def _kept(self) -> set[str]:
        """What selective checkpointing keeps, by part, or "grouped", "reduce_scatter"."""
        table = self.config.activation_checkpoint
        if table.mode != "selective":
            return set()
        ops = resolve_ops(tuple(table.save_ops or self.memory.model.plan.save_ops))
        named = {
            "products": "aten::mm",
            "grouped": "keel::grouped_mm",
            "attention": "aten::_scaled_dot_product_flash_attention",
            "Gated DeltaNet": "keel::delta_rule" if self.has_delta_kernels else "",
            "reduce_scatter": "_c10d_functional::reduce_scatter_tensor",
        }
        return {word for word, op in named.items() if op in ops}

    def repeats(self, layer: int) -> bool:
        """Whether the backward pass computes a part of a layer again; "budget" repeats a share of each."""
        return self.config.activation_checkpoint.mode not in ("none", "budget") and layer in self._checkpointed

    @cached_property
    def _checkpointed(self) -> set[int]:
        return set(selected_layers(self.config.activation_checkpoint, self.config.model.n_layers))

    def repeated(self, layer: int) -> Seconds:
        """What the backward pass of a layer computes again."""
        table = self.config.activation_checkpoint
        if table.mode == "budget":
            share = 1 - table.memory_budget
            return {part: share * each for part, each in self.forward(layer).items()}
        if not self.repeats(layer):
            return {}
        matrices = list(self.matrices(layer))
        nth = table.save_every_nth_matmul
        plain = [each.name for each in matrices if not each.is_grouped]
        kept = plain[nth - 1 :: nth] if "products" in self._kept else []
        kept += [each.name for each in matrices if each.is_grouped and "grouped" in self._kept]
        again = [each.name for each in matrices[:-1] if each.name not in kept]  # the last is never repeated
        repeated = {"products": self._forward_products(layer, again)}
        mixer, forward, _ = self.mixing(layer)
        repeated[mixer] = 0.0 if mixer in self._kept else forward
        repeated["elementwise"] = self.elementwise(layer)[0]
        return added(repeated, self._exposed(layer, "repeated", repeated))

    # ------------------------------------------------------------------------- a micro-batch

    def forward(self, layer: int) -> Seconds:
        return self._pass(layer, "forward", self._forward_products(layer))

    def backward(self, layer: int) -> Seconds:
        return self._pass(layer, "backward", self._backward_products(layer))

    def _pass(self, layer: int, kind: str, products: float) -> Seconds:
        mixer, *mixing = self.mixing(layer)
        place = ("forward", "backward").index(kind)
        elementwise = self.elementwise(layer)[place] + self._casts(layer)[place]
        found = {"products": products, mixer: mixing[place], "elementwise": elementwise}
        return added(found, self._exposed(layer, kind, found))

    def head(self) -> Seconds:
        """The head, and a loss that computes the logits' gradients along with them."""
        model = self.config.model
        logits = self.tokens * model.vocab_size / self.sizes.tp
        products = 3 * 2 * logits * model.dim / self.device.products
        stream = self.tokens * model.dim * self.memory.compute_bytes
        return {
            "head and loss": products + _LOGIT_BYTES * self._wider * logits / self.device.memory,
            "tp": 2 * self.network.seconds("all_gather", stream, *self.axis("tp")),
        }
