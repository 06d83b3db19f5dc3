"""Which matrices are multiplied in float8: the blocks', but for those that the job skips; experts' if it says so.

Embedding and head stay in compute_dtype: the embedding is no product, and the head's logits decide the loss directly,
are a small part of the FLOPs of a large model, and lose most by rounding (torchao and torchtitan leave it out as well).
A router stays, too, because it chooses by small differences, and so do a mixture's shared experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from configs.errors import ConfigError
from configs.plan import PARAMETER_ROLES, TENSOR_PARALLEL_DIM, Plan
from configs.schema import Config

MULTIPLE = 16
"""Both dimensions of a matrix must be multiples of this for a GPU's float8 matmuls."""


@dataclass(frozen=True)
class Choice:
    """The matrices of the blocks, by the name of their module; experts' by the parameter that stacks them."""

    converted: tuple[str, ...]
    skipped: tuple[str, ...]
    """Matrices that match float8.skip."""
    odd: tuple[str, ...]
    """Matrices with a dimension that is not a multiple of 16."""
    of_experts: frozenset[str] = frozenset()
    """Which of them all are stacks of experts' matrices."""

    def __str__(self) -> str:
        total = sum(map(len, (self.converted, self.skipped, self.odd)))
        parts = [f"{len(self.converted)} of the blocks' {total} matrices"]
        stacks = len(self.of_experts.intersection(self.converted))
        parts += [f"{stacks} of them stacks of experts'"] if stacks else []
        parts += [f"{len(self.skipped)} skipped by float8.skip"] if self.skipped else []
        parts += [f"{len(self.odd)} have dimensions that are no multiples of {MULTIPLE}"] if self.odd else []
        return ", ".join(parts)


def choose(shapes: Mapping[str, Sequence[int]], plan: Plan, config: Config) -> Choice:
    """Choose among a whole model's parameters.

    Args:
        shapes: of all parameters by name, on one rank.
        plan: the model's.

    Raises:
        ConfigError: float8.skip names no matrix, no matrix is left, or tensor parallelism cuts one into pieces that a
            GPU cannot multiply in float8.
    """
    stacks = _stacks(shapes, plan) if config.float8.experts else {}
    matrices = _matrices(shapes, plan) | stacks
    for pattern in config.float8.skip:
        if not any(fnmatchcase(name, pattern) for name in matrices):
            example = next(iter(matrices), "nothing")
            raise ConfigError(f'float8.skip: "{pattern}" matches no matrix of the blocks (such as {example})')
    skipped = [name for name in matrices if any(fnmatchcase(name, pattern) for pattern in config.float8.skip)]
    odd = [name for name, shape in matrices.items() if name not in skipped and any(n % MULTIPLE for n in shape)]
    converted = [name for name in matrices if name not in skipped and name not in odd]
    if not converted:
        raise ConfigError(
            f'float8.recipe is "{config.float8.recipe}", but no matrix is left: of the blocks\' {len(matrices)}, '
            f"{len(skipped)} are skipped by float8.skip, and {len(odd)} have dimensions that are no multiples of "
            f'{MULTIPLE}; set recipe = "none"'
        )
    for name in converted:
        _check_piece(name, matrices[name], plan, config.mesh.tp)
    return Choice(tuple(converted), tuple(skipped), tuple(odd), frozenset(stacks))


def _matrices(shapes: Mapping[str, Sequence[int]], plan: Plan) -> dict[str, Sequence[int]]:
    """The blocks' matrices (out, in) by module; neither those of a mixture, nor those that compress for attention.

    Tensor parallelism replaces how these are multiplied.
    """
    blocks = tuple(f"{block}." for block in plan.blocks)
    mixtures = tuple(f"{experts.rpartition('.')[0]}." for experts in plan.experts)
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.startswith(blocks)
        and not name.startswith(mixtures)
        and plan.tensor_parallel.get(name) not in PARAMETER_ROLES
    }


def _stacks(shapes: Mapping[str, Sequence[int]], plan: Plan) -> dict[str, Sequence[int]]:
    """The matrices (out, in) of the blocks' experts, by the parameter that stacks them."""
    blocks = tuple(f"{block}." for block in plan.blocks)
    experts = tuple(f"{name}." for name in plan.experts if name.startswith(blocks))
    return {name: shape[-2:] for name, shape in shapes.items() if name.startswith(experts) and len(shape) == 3}


def _check_piece(name: str, shape: Sequence[int], plan: Plan, tp: int) -> None:
    size = shape[TENSOR_PARALLEL_DIM[plan.tensor_parallel[name]]]
    if tp > 1 and size // tp % MULTIPLE:
        raise ConfigError(
            f"mesh.tp {tp} cuts {name} into pieces of {size} / {tp} = {size // tp}, no multiple of {MULTIPLE}, which "
            f'float8 matmuls need; lower tp, or add "{name}" to float8.skip'
        )
