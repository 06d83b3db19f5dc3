"""Float8 matmuls, by torchao (Micikevicius et al. 2022, FP8 Formats for Deep Learning).

Each product's factors are scaled so that their largest absolute value is the largest that the 8-bit type has, and
rounded to it: by `tensorwise` with one scale for a tensor, by `rowwise` with one for each row (the scale then being a
power of two). Activations and weights have 3 bits of mantissa (e4m3); by `tensorwise` the gradients have 2 and a wider
range (e5m2). Sums are in float32 or nearly so. Experts' products are Keel's own (`float8_experts.py`). Parameters,
their gradients and the optimizer's state stay as they are, under the same names.

Scales are over what a product sees. Under tensor parallelism torchao takes them over all shards, since the factors are
DTensors. The scales of activations and of their gradients are over the tokens that a rank computes at once, so that
with these two recipes the micro-batch decides values; by `rowwise_with_gw_hp` only single tokens do.

With `float8.fsdp_all_gather`, FSDP rounds each shard and all-gathers float8. For that it asks a shard for two methods
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`), which torchao has on a subclass of Tensor. A parameter of such a class
would have to pass through initialization, optimizer and checkpoints. So the shards stay plain tensors and are only
given the methods.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.errors import ConfigError
from configs.float8 import Choice, choose
from configs.plan import plan_of
from configs.schema import Config, Float8
from parallelisms.float8_experts import apply_to_experts
from parallelisms.grad_norm import norms_of
from parallelisms.mesh import Mesh

_INSTALL = "pip install 'torchao>=0.18'"
_CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""The lowest compute capability of an NVIDIA GPU that has float8 matmuls: Ada, Hopper."""


_CAPABILITY_FOR_EXPERTS = (9, 0)
"""The only one for which torch has a grouped product with a scale for each row."""


def check_float8(config: Float8, device: torch.device) -> None:
    """Check that this machine can multiply in float8 as the job says.

    Raises:
        ConfigError: torchao is not installed, or the device cannot.
    """
    if config.recipe == "none":
        return
    _torchao(config.recipe)
    if config.emulate:
        return
    asked = f'float8.recipe is "{config.recipe}"'
    if device.type == "cpu":
        raise ConfigError(
            f"{asked}, but this run is on a CPU, which has no float8 matmuls: set float8.emulate = true, or "
            'recipe = "none"'
        )
    capability = torch.cuda.get_device_capability(device)
    needed = _CAPABILITIES[config.recipe]
    if torch.version.hip is None and capability < needed:
        has, needs = (".".join(map(str, version)) for version in (capability, needed))
        raise ConfigError(
            f"{asked}, but {torch.cuda.get_device_name(device)} has compute capability {has}, and it needs {needs} or "
            'higher: set float8.emulate = true to compute the same values slowly, or recipe = "none"'
        )
    if config.experts and (torch.version.hip is not None or capability != _CAPABILITY_FOR_EXPERTS):
        raise ConfigError(
            "float8.experts is true, but torch multiplies experts' rows in float8 only on NVIDIA GPUs of compute "
            f"capability 9.0 (Hopper), and this is {torch.cuda.get_device_name(device)}: set float8.emulate = true to "
            "compute the same values slowly, or experts = false"
        )


def _torchao(recipe: str) -> Any:
    """torchao.float8, without the warnings of its import: of kernels for other GPUs, and of its own old calls."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.float8
        import torchao.float8.float8_linear
        import torchao.float8.float8_utils
        import torchao.float8.fsdp_utils
    except ImportError as error:
        raise ConfigError(
            f'float8.recipe is "{recipe}", which needs the package torchao ({error}): {_INSTALL}'
        ) from None
    finally:
        logging.disable(disabled)
    return torchao.float8


# --------------------------------------------------------------------------- in the model


def choice_of(model: nn.Module, config: Config) -> Choice | None:
    """The matrices of a whole model that are multiplied in float8; None: none.

    Raises:
        ConfigError: as in `choose`.
    """
    if config.float8.recipe == "none":
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return choose(shapes, plan_of(model), config)


def apply_float8(model: nn.Module, choice: Choice | None, config: Float8, tp_group: str = "") -> None:
    """Let the chosen matrices of a model or stage multiply in float8; call it before techniques that change them.

    Args:
        model: whole or a stage.
        choice: of the whole model.
        config: the job's.
        tp_group: name of the group that tensor parallelism will cut matrices over; "": none.
    """
    if choice is None:
        return
    torchao = _torchao(config.recipe)
    chosen = set(choice.converted)
    recipe = replace(torchao.Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)

    def is_chosen(block: str, _matrix: nn.Module, name: str) -> bool:
        return f"{block}.{name}" in chosen

    for block in plan_of(model).blocks:
        torchao.convert_to_float8_training(
            model.get_submodule(block), module_filter_fn=partial(is_chosen, block), config=recipe
        )
    apply_to_experts(model, choice, config.emulate, tp_group)


# --------------------------------------------------------------------------- all-gathers


def gather_in_8_bits(stages: Iterable[nn.Module], config: Config, mesh: Mesh) -> list[Callable[..., None]]:
    """Let FSDP all-gather weights in float8, with scales that are computed at each forward pass of a stage.

    The parameters must be in memory, and stay the same tensors from now on; FSDP must not have gathered them yet.

    Returns:
        What computes the scales of each stage, for what gathers its weights before its forward hooks run.

    Raises:
        ConfigError: a weight's rows cannot be cut evenly.
    """
    if not config.float8.fsdp_all_gather:
        return []
    computed: list[Callable[..., None]] = []
    float8 = _torchao(config.float8.recipe)
    groups = (mesh.fsdp.get_group(mesh.fsdp.ndim - 1), mesh.tp.get_group())
    for stage in stages:
        shards: dict[Any, Callable[..., Any]] = {}
        for name, linear in stage.named_modules():
            if isinstance(linear, float8.float8_linear.Float8Linear) and isinstance(linear.weight, DTensor):
                settings = linear.linear_mm_config, linear.config.cast_config_weight.target_dtype
                shard = _even_shard(name, linear.weight)
                shards[shard] = partial(_give_methods, shard, float8.fsdp_utils, settings)
                shards[shard](None)  # FSDP looks for the methods before the first forward pass
        if shards:
            to_scale = partial(float8.float8_utils.amax_to_scale, float8_dtype=settings[1])
            computed.append(partial(_set_scales, shards, groups, to_scale))
            stage.register_forward_pre_hook(computed[-1], prepend=True)
    return computed


def _give_methods(shard: Any, fsdp_utils: Any, settings: tuple[Any, torch.dtype], scale: Tensor | None) -> None:
    weight = fsdp_utils.WeightWithDynamicFloat8CastTensor(shard, *settings, scale)
    shard.fsdp_pre_all_gather = weight.fsdp_pre_all_gather
    shard.fsdp_post_all_gather = weight.fsdp_post_all_gather


def _even_shard(name: str, parameter: DTensor) -> Tensor:
    cuts = zip(parameter.device_mesh.shape, cast(Any, parameter.placements), strict=True)
    # Rows that tensor parallelism has cut, too, FSDP cuts by a placement that is no `Shard`.
    pieces = prod(size for size, placement in cuts if not placement.is_replicate() and placement.dim == 0)
    if parameter.shape[0] % pieces:
        raise ConfigError(
            f"float8.fsdp_all_gather: {pieces} ranks cannot cut the {parameter.shape[0]} rows of {name} evenly; "
            f'change mesh.dp_shard, add "{name}" to float8.skip, or set fsdp_all_gather = false'
        )
    return parameter._local_tensor  # what FSDP asks for its methods; since torch 2.13 `to_local` returns a view of it


def _set_scales(
    shards: Mapping[Any, Callable[..., Any]],
    groups: Sequence[dist.ProcessGroup],
    to_scale: Callable[[Tensor], Tensor],
    *_: object,
) -> None:
    """Take each weight's scale from its largest absolute value on all ranks, with one reduction for all weights.

    This reads every shard once in a forward pass. Scales kept from the update to the next forward pass would be wrong
    after whatever else changes weights in between: loading, going back, healing.

    Args:
        shards: for each, what gives it the methods of torchao's tensor with a scale.
        groups: whose ranks hold other shards of the same weights.
        to_scale: the scales of largest values.
    """
    with torch.no_grad():
        largest = norms_of(list(shards), inf)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        for give_methods, scale in zip(shards.values(), to_scale(largest).unbind(), strict=True):
            give_methods(scale)
