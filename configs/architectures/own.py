"""A model of the user's own: the keys of [model], and what the checks of a job ask its options.

Keel has no description of its weights: `models/own.py` builds the user's class, which has the plan. The class takes one
argument, its options, whose annotation names a pydantic model or a dataclass. `[model.options]` is checked by it when
the job is loaded, and holds all options with their values from then on. Nothing here imports torch.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace, new_class
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from configs.architectures.parts import small_size
from configs.errors import ConfigError
from configs.own_code import ImportPath, code_of, is_admitted
from configs.table import PositiveInt, Table

NEEDED = ("vocab_size", "dim", "n_layers")
"""What every class of options must have, as fields or properties."""


class Options(Table):
    """A base for the options of a model: strict types, no unknown keys. Another class needs these attributes, too."""

    vocab_size: PositiveInt
    """Number of tokens in the vocabulary."""
    dim: PositiveInt
    """Width of the residual stream."""
    n_layers: PositiveInt
    """Number of blocks."""
    n_heads: PositiveInt = 1
    """Number of attention heads, which tensor parallelism divides."""
    max_seq_len: PositiveInt | None = None
    """Longest sequence that the model takes; None: any."""


class OwnKeys(Table):
    """The keys of [model] for a model of the user's own."""

    architecture: ImportPath
    """Or a model of your own, by its import path (docs/own_models.md)."""
    options: dict[str, Any] = Field(default={}, json_schema_extra={"additionalProperties": True})
    """Options of a model of your own, checked by its own class."""

    def __hash__(self) -> int:
        return hash((self.architecture, json.dumps(self.options, sort_keys=True)))

    @property
    def resolved(self) -> Any:
        """The options as the model takes them; without its code, as in a checkpoint's config, what is stored."""
        if not is_admitted(self.architecture):
            return SimpleNamespace(**self.options)
        try:
            return parsed(options_class(code_of(self.architecture)), self.options)
        except ValidationError as error:  # those that a checkpoint holds, after the class has changed
            raise ConfigError(f'"{self.architecture}" no longer takes its stored options: {error}') from None

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self._size("dim")

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return self._size("n_layers")

    @property
    def n_heads(self) -> int:
        """Number of query heads; 1 if the options have none."""
        return self._size("n_heads", 1)

    @property
    def n_kv_heads(self) -> int | None:
        """Number of key and value heads; None: as many as query heads."""
        return getattr(self.resolved, "n_kv_heads", None)

    @property
    def head_dim(self) -> int | None:
        """Width of one head; None: dim / n_heads."""
        return getattr(self.resolved, "head_dim", None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._size("vocab_size")

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence that the model takes; None: any."""
        return getattr(self.resolved, "max_seq_len", None)

    @property
    def n_experts(self) -> None:
        """None: only the model, once it is built, says how many each of its mixtures has (`Plan.n_counted`)."""
        return None

    @property
    def experts_per_token(self) -> int | None:
        """Number of experts that a token is sent to; None: there are none."""
        return getattr(self.resolved, "experts_per_token", None)

    def _size(self, name: str, default: int | None = None) -> int:
        value = getattr(self.resolved, name, default)
        if value is None:
            raise ConfigError(f'the options of "{self.architecture}" have no {name}, which Keel needs')
        return value


# --------------------------------------------------------------------------- options


@cache
def options_class(model: Any) -> type:
    """The class of a model's options: the annotation of the one argument of its constructor.

    Raises:
        ConfigError: there is none.
    """
    try:
        parameters = list(inspect.signature(model).parameters)
        hints = get_type_hints(model.__init__ if inspect.isclass(model) else model)
        kind = hints[parameters[0]]
    except (IndexError, KeyError, NameError, TypeError, ValueError):
        kind = None
    is_options = dataclasses.is_dataclass(kind) or (inspect.isclass(kind) and issubclass(kind, BaseModel))
    if kind is None or not is_options:
        raise ConfigError(
            f"{model.__name__} must take one argument, its options, annotated with their class, a pydantic model or a "
            f"dataclass: def __init__(self, options: {model.__name__}Options)"
        )
    return kind


def parsed(kind: type, values: Mapping[str, Any]) -> Any:
    """An instance of a class of options, checked strictly.

    Raises:
        ValidationError: a value has a wrong type, or is missing or unknown.
    """
    if dataclasses.is_dataclass(kind):
        return kind(**{name: getattr(_table_of(kind).model_validate(values), name) for name in fields_of(kind)})
    assert issubclass(kind, BaseModel)
    # An argument of model_validate says the same since pydantic 2.12.
    members = {"model_config": ConfigDict(extra="forbid"), "__module__": kind.__module__, "__doc__": kind.__doc__}
    strict: Any = new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(members))
    return strict.model_validate(dict(values), strict=True)


def fields_of(kind: type) -> list[str]:
    """Names of the options."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return list(getattr(kind, "model_fields", ()))


@cache
def _table_of(kind: Any) -> type[BaseModel]:
    """A dataclass as a strict pydantic model; its own checks run when it is made."""
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.init:
            factory = field.default_factory
            default = ... if field.default is dataclasses.MISSING else field.default
            given = Field(default=default) if factory is dataclasses.MISSING else Field(default_factory=factory)
            fields[field.name] = (hints[field.name], given)
    return create_model(kind.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)


# --------------------------------------------------------------------------- the family


def shape(model: OwnKeys) -> str:
    """The options, for people, without tables among them."""
    words = ", ".join(f"{name} {value}" for name, value in model.options.items() if not isinstance(value, dict))
    return f"{model.architecture}: {words}"


def split_sizes(model: OwnKeys) -> dict[str, int]:
    """The sizes that tensor parallelism splits, by key; those of the matrices are checked with the model built."""
    options = model.resolved
    heads = {f"model.options.{name}": getattr(options, name, None) for name in ("n_heads", "n_kv_heads")}
    return {key: size for key, size in heads.items() if size} | {"model.options.vocab_size": model.vocab_size}


def computed(model: OwnKeys) -> dict[str, Any]:
    """The name and the options, any of which may decide the model's output."""
    options = {f"options.{name}": value for name, value in model.options.items()}
    return {"architecture": model.architecture, **options}


def rules(config: Any) -> Iterator[tuple[str, str]]:
    """What a job asks for that no model of the user's own offers: the key to blame, and a message."""
    model = config.model
    if config.float8.recipe != "none":
        yield (
            "float8.recipe",
            "float8 matmuls replace Keel's own matrices, not those of a model of one's own; leave it out",
        )
    if model.max_seq_len is not None and config.training.seq_len > model.max_seq_len:
        yield (
            "training.seq_len",
            f"seq_len {config.training.seq_len} is more than max_seq_len {model.max_seq_len} of {model.architecture}; "
            "change one of them",
        )


_LEAST_VOCABULARY = 128


def small(model: OwnKeys, ranks: int) -> dict[str, Any]:
    """Options of a small model of the same structure (`Family.small`).

    The method `small(ranks)` of the options returns those to change. Without it, the vocabulary and the number of
    layers get small, where they are fields.
    """
    own = getattr(model.resolved, "small", None)
    if callable(own):
        return {"options": model.options | own(ranks)}
    least = {
        "vocab_size": small_size(model.vocab_size, _LEAST_VOCABULARY, ranks),
        "n_layers": min(model.n_layers, 4),
    }
    return {"options": model.options | {name: size for name, size in least.items() if name in model.options}}
