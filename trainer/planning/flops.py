"""A token's cost: parameters, FLOPs, and the share of the device's peak that they make (MFU).

For one token, the forward and backward pass cost, as in appendix B of PaLM (Chowdhery et al. 2022),

    6 * matrix elements + 12 * layers * heads * head_dim * seq_len        [full]

A matrix costs 2 FLOPs per element in forward and 4 in backward. In a mixture of experts, only the experts count that a
token is sent to (none is dropped, so all are computed). The embedding is looked up, not multiplied, and not counted
unless the head is tied to it; attention multiplies queries by keys, and scores by values. Norms, rotary positions,
softmax and SwiGLU's product are left out, as is what activation checkpointing recomputes.

The formula counts all of the seq_len x seq_len scores, but a causal model needs (and a flash kernel computes) half:

    6 * matrix elements +  6 * layers * heads * head_dim * seq_len        [causal]

A layer with a window counts the tokens that are in it, instead of seq_len. Where values have another width than queries
and keys (latent attention), head_dim is the mean of both; the zeros that values are padded with are not counted.

A layer of kind delta (Gated DeltaNet) has no scores. Each value head's state, key_head_dim x value_head_dim, is read
with the key, moved by the token's correction, and read with the query: in both formulas

    18 * value_heads * key_head_dim * value_head_dim

That is the recurrent form; chunks of tokens take more products, which are not counted.

A module that predicts further tokens (model.multi_token) counts as a layer, its joining matrix and one more head.

Keel's `mfu` and `tflops` are the *causal* ones: they count only work that is really done, and so cannot flatter long
sequences. The figures that PaLM, llm-foundry and torchtitan publish are full ones (early torchtitan's also count the
embedding); to compare, multiply `mfu` by full / causal, which are both in the start-up summary. Both count what
`data.document_mask` hides.

For frozen parameters, the backward pass skips their gradients, and the gradients of activations that only they led to.
Neither is counted.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from configs.architectures import all_weights, block_names
from configs.architectures.llama_keys import is_delta, window_of
from configs.architectures.parts import Weight
from configs.layout import mixed_elements
from configs.plan import TENSOR_PARALLEL_DIM, TensorRole
from configs.schema import AnyModel, Training, is_described
from trainer.planning.skeleton import skeleton


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of the forward and backward pass of one token."""

    causal: int
    """FLOPs with half of the attention scores, as counted by `mfu` and `tflops`."""
    full: int
    """FLOPs with all attention scores, as counted by PaLM's formula."""


def flops_per_token(model: AnyModel, seq_len: int, frozen: Collection[str] = ()) -> TokenFlops:
    """FLOPs per token of a sequence of `seq_len` tokens, by the formulas in the module docstring.

    Args:
        model: the model's table.
        seq_len: tokens per sequence.
        frozen: names of the frozen parameters.
    """
    weights = list(all_weights(model) if is_described(model) else _weights_of(model))
    blocks = block_names(model) if is_described(model) else range(model.n_layers)
    further = len(blocks) - model.n_layers
    # Each module that predicts a further token multiplies by the head again.
    heads = sum(_multiplied(weight) for weight in weights if weight.role == "head") * further
    matrices = sum(_multiplied(weight) for weight in weights) + heads
    idle, idle_layers = _left_out(model, weights, frozen) if frozen else (0, set())
    computed = 6 * matrices - 2 * idle
    causal = full = float(computed)
    for layer in range(len(blocks)):
        passes = 1 if layer in idle_layers else 3  # backward takes two
        mixed = 2 * passes * mixed_elements(model, layer, tokens_seen(model, layer, seq_len))
        causal += mixed
        full += mixed if is_delta(model, layer) else 2 * mixed
    return TokenFlops(round(causal), round(full))


def tokens_seen(model: AnyModel, layer: int, seq_len: int) -> float:
    """Twice the mean number of tokens that a token sees in a layer, of which a causal model has half of seq_len."""
    window = window_of(model, layer)
    if window is None or window >= seq_len:
        return seq_len
    return 2 * window - window * (window - 1) / seq_len


def _weights_of(config: AnyModel) -> Iterator[Weight]:
    """The weights of a model without a description, in the order of its modules; a tied head is one of them."""
    model = skeleton(config)
    plan = model.plan
    embedding = f"{plan.before_blocks[0]}.weight"
    head = f"{plan.after_blocks[-1]}.weight"
    for name, shape in model.shapes.items():
        role: TensorRole = "embedding" if model.is_before_blocks(name) else "head" if name == head else "column"
        used = config.experts_per_token if len(shape) > 2 else None
        yield Weight(name, shape, role, used=used)
    if head not in model.shapes:
        yield Weight(head, model.shapes[embedding], "head", tied_to=embedding)


def _multiplied(weight: Weight) -> int:
    """Elements of a matrix by which a token is multiplied; 0 for norms, and for an embedding, which is looked up."""
    return weight.active if weight.is_matrix and weight.role != "embedding" else 0


def _left_out(model: AnyModel, weights: Sequence[Weight], frozen: Collection[str]) -> tuple[int, set[int]]:
    """What a backward pass skips: gradients, in elements of the matrices, and the layers whose attention it skips.

    A frozen matrix has no gradient, and its input has none if nothing before it trains. Matrices with the same input
    (q, k and v; gate and up) are neighbors in one module, and sharded the same way by tensor parallelism.
    """

    def place(weight: Weight) -> tuple[str, int | None]:
        module = weight.name.removesuffix(".weight").rpartition(".")[0]
        return module, TENSOR_PARALLEL_DIM.get(weight.role)

    elements = 0
    is_reached = False
    through: dict[str, bool] = {}  # whether a gradient flows through a module, to the input of its last matrix
    for (module, _), neighbors in groupby(weights, place):
        through[module] = is_reached
        names = {weight.tied_to or weight.name: weight for weight in neighbors}
        for name, weight in names.items():
            elements += ((name in frozen) + (not is_reached)) * _multiplied(weight)
        is_reached = is_reached or not names.keys() <= set(frozen)
    mixers = enumerate(skeleton(model).plan.mixers)
    return elements, {layer for layer, name in mixers if not through.get(name, True)}


# --------------------------------------------------------------------------- devices


@dataclass(frozen=True)
class _Peak:
    """Dense (not 2:4 sparse) TFLOP/s from NVIDIA's data sheets."""

    bfloat16: float
    tf32: float
    float32: float


_H100_SXM = _Peak(989.5, 494.5, 67.0)
_H100_PCIE = _Peak(756.5, 378.0, 51.0)
_HOPPER_NVL = _Peak(835.5, 417.5, 60.0)
_A100 = _Peak(312.0, 156.0, 19.5)

# By the exact name that torch.cuda.get_device_name returns: "GH200", "A100-SXM-64GB" (a variant) and MIG slices
# ("H100 80GB HBM3 MIG 1g.10gb") contain a known name, yet have another peak.
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    "NVIDIA B200": _Peak(2250.0, 1125.0, 75.0),
}


def peak_flops(device_name: str, training: Training) -> float | None:
    """A device's dense peak FLOP/s for matrix products; None if it is not known for certain, as for any CPU.

    Args:
        device_name: from `torch.cuda.get_device_name()`, or "cpu".
        training: says in what products are computed; float32 ones run on the tensor cores with `tf32`.
    """
    peak = _PEAKS.get(device_name)
    if peak is None or training.compute_dtype == "float64":
        return None
    if training.compute_dtype == "bfloat16":
        return peak.bfloat16 * 1e12
    return (peak.tf32 if training.tf32 else peak.float32) * 1e12


def tflops_per_device(tokens_per_second: float | None, flops_a_token: int, world_size: int) -> float | None:
    """Average model TFLOP/s per device; None if the speed is unknown."""
    return None if tokens_per_second is None else tokens_per_second * flops_a_token / world_size / 1e12


def mfu(tflops: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilization, 0 to 1, from `tflops_per_device` and `peak_flops`; None if either is unknown."""
    return None if tflops is None or peak is None else tflops * 1e12 / peak
