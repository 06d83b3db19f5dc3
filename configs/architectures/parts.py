"""What every description of a model family is made of: its weights, and the Hugging Face classes that compute it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from math import gcd, prod
from typing import Any, Literal, Protocol

from configs.plan import TensorRole

Shape = tuple[int, ...]

Start = Literal["normal", "residual", "ones", "zeros", "log_of_uniform"]
"""Initial values. normal: with model.init_std; residual: normal, but scaled down by sqrt(2 * layer), layers counted
from one, for the matrices that write to the residual stream: it keeps the stream's variance from growing with depth
(Zhang, Titov and Sennrich 2019, section 3; each layer writes twice); ones, zeros: all 1, all 0; log_of_uniform:
logarithms of the initial rates at which a memory fades (`configs.plan.Initial`)."""


@dataclass(frozen=True)
class Weight:
    """A parameter of a model."""

    name: str
    """Name as in `model.named_parameters()`; in a block, without the block's name."""
    shape: Shape
    """Three dimensions stack the same matrix of all experts."""
    role: TensorRole
    """Role under tensor parallelism, of the parameter or of its module (`Plan.tensor_parallel`)."""
    start: Start = "normal"
    hf: str = ""
    """Hugging Face's name, of the whole name or in a block; {} stands for the number of a stacked expert; default:
    `name`."""
    used: int | None = None
    """Stacked experts that a token is sent to."""
    tied_to: str = ""
    """Name of the parameter that it shares the matrix with."""
    joined: int = 0
    """Number of parts that a tensor of Hugging Face's format has, of each of which this weight has some rows, beside
    other weights of the same `hf`, in their order; 0: the tensor is this weight alone."""
    is_filter: bool = False
    """Whether it has a channel's filter in each row, which Hugging Face's format has as (channels, 1, kernel)."""
    has_fixed_rows: bool = False
    """Whether a matrix in a block has as many rows in a model of any width."""
    is_buffer: bool = False
    """Whether it is a buffer of the model's state, in float32, and no parameter."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them, and not a norm's vector."""
        return len(self.shape) > 1

    @property
    def active(self) -> int:
        """Number of elements that a token is multiplied with."""
        return self.size if self.used is None else self.size // self.shape[0] * self.used

    @property
    def hf_names(self) -> list[str]:
        """Hugging Face's names: one, or one for each stacked expert."""
        name = self.hf or self.name
        return [name] if len(self.shape) < 3 else [name.format(expert) for expert in range(self.shape[0])]

    @property
    def hf_shape(self) -> Shape:
        """Shape of each of the tensors with these names; of a joined one, with this weight's rows alone."""
        return (self.shape[0], 1, self.shape[1]) if self.is_filter else self.shape[-2:]

    def inside(self, block: str) -> "Weight":
        """The same weight with its whole name, in the block called `block`."""
        return replace(self, name=f"{block}.{self.name}", hf=f"model.{block}.{self.hf or self.name}")


def small_size(size: int, least: int, ranks: int, step: int = 1) -> int:
    """The smallest size from `least` on that the numbers of ranks up to `ranks` divide where they divide `size`.

    What a mesh can't cut of the real size, it can't cut of this one. `ranks` is a power of two. `least` and `size` are
    multiples of `step`, and the result, too.
    """
    shared = gcd(size, ranks)
    return next(n for n in count(least, step) if gcd(n, ranks) == shared)


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HfClass:
    """A class that computes models of a family, of the package `transformers` or published with its models."""

    model_type: str
    name: str
    """Name of the class."""
    title: str
    """Name of its models, for messages."""
    fields: Mapping[str, str]
    """Field of config.json -> key of [model]."""
    defaults: Mapping[str, Any]
    """Default of a field where Keel's differs, or might come to differ."""
    rope_theta: float
    """Default of rope_theta, which has several places in config.json."""
    fixed: Mapping[str, Any]
    """Field of config.json -> the only value with which Keel computes the same; another value is another model."""
    keys: Mapping[str, tuple[Any, ...]]
    """Key of [model], dotted -> the values that its models may have. It imports models with the first."""
    rope_by_layer: bool = False
    """Whether layers with a window have rotary frequencies of their own, without scaling."""
    window_rope_theta: float | None = None
    """Default of their rope_theta; None: as in all layers."""
    rope_fraction: float | None = None
    """Default of the share of each head's features that are rotated; None: all are, without a field for it."""
    in_transformers: bool = True
    """Whether it is transformers' and not code published with the models."""
    gates_shared_expert: bool = False
    """Whether a layer of experts has a shared one with a gate."""
    left_out: str = ""
    """Prefix of tensors that its folders may have, and that neither the class nor Keel computes with."""
    yarn_scales_scores: bool = False
    """Whether YaRN has a factor on the scores of attention (mscale_all_dim), which query_scale stands for."""
    has_further: bool = False
    """Whether its folders have the modules that predict further tokens, which the class itself does not compute."""
    write: Callable[[Any], dict[str, Any]] = _nothing
    """[model] -> further fields of config.json, which follow from several keys."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """config.json -> the keys that such fields decide; a ValueError says what Keel has no key for."""

    def differences(self, model: Any) -> list[str]:
        """How a model's keys differ from those of its models."""
        values = {key: reduce(getattr, key.split("."), model) for key in self.keys}
        found = [
            f"{key} is {value!r}, not {' or '.join(map(repr, self.keys[key]))}"
            for key, value in values.items()
            if value not in self.keys[key] and key not in model.keys_in_vain
        ]
        scaled_windows = model.window and model.rope_scaling and model.window_rope_theta is None
        if self.rope_by_layer and scaled_windows:
            found.append("rope_scaling applies to layers with a window, too; set window_rope_theta")
        yarn = model.rope_scaling if model.rope_scaling and model.rope_scaling.kind == "yarn" else None
        if self.yarn_scales_scores and model.query_scale and (yarn is None or yarn.factor == 1):
            found.append(f"query_scale is {model.query_scale!r} without a rope_scaling of kind yarn")
        if "query_scale" in self.fields.values() and model.query_scale and model.query_scale % 1:
            found.append(f"query_scale is {model.query_scale!r}, no whole number")
        if self.gates_shared_expert and model.n_experts and not model.n_shared_experts:
            found.append("n_shared_experts is 0 with n_experts")
        return found


class Heads(Protocol):
    """What every table [model] says of its attention."""

    @property
    def dim(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...


def head_dim(model: Heads) -> int:
    """Width of one attention head."""
    return model.head_dim or model.dim // model.n_heads


def n_kv_heads(model: Heads) -> int:
    """Number of key and value heads."""
    return model.n_kv_heads or model.n_heads


class Family(Protocol):
    """What the file of every architecture has; `model` is an instance of its keys."""

    def shape(self, model: Any, /) -> str:
        """Its sizes, for people, on one line or more."""

    def split_sizes(self, model: Any, /) -> dict[str, int]:
        """The sizes that tensor parallelism splits, by key; each must be a multiple of mesh.tp."""

    def computed(self, model: Any, /) -> dict[str, Any]:
        """What decides the model's output for given weights, by key, with the values that apply."""

    def rules(self, config: Any, /) -> Iterator[tuple[str, str]]:
        """What is wrong between the keys of [model], or asked for and impossible: the key to blame, and a message."""

    def small(self, model: Any, ranks: int, /) -> dict[str, Any]:
        """The keys of [model] to change for a small model of the same structure, with which `keel prove` computes.

        It has every kind of layer and every option, and sizes that meshes of up to `ranks` ranks, a power of two, can
        cut where they can cut those of `model` (`small_size`).
        """


class Described(Protocol):
    """What the file of an architecture has, too, that describes its weights; then no code needs the modules for it."""

    HF_CLASSES: tuple[HfClass, ...]

    def hf_class(self, model: Any, /) -> HfClass:
        """The class that computes the model, if it has the values of `HfClass.keys`."""

    def model_rules(self, model: Any, /) -> Iterator[tuple[str, str]]:
        """Those of `rules` that are about the model alone, in whatever job."""

    def before_blocks(self, model: Any, /) -> list[Weight]:
        """The weights before the first block."""

    def block(self, model: Any, layer: int, /) -> Sequence[Weight]:
        """The weights of a block, in the order of the forward pass, with their names in the block."""

    def buffers(self, model: Any, layer: int, /) -> Sequence[Weight]:
        """The buffers of a block that are part of the model's state, in float32, with their names in the block."""

    def around(self, model: Any, layer: int, /) -> dict[str, TensorRole]:
        """Roles of the modules in a block that have no weights of their own."""

    def after_blocks(self, model: Any, /) -> list[Weight]:
        """The weights after the last block."""
