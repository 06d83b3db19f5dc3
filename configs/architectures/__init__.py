"""One description for each model family, from which all that needs no module of the model follows.

A description has the family's keys, its weights (name, shape, role under tensor parallelism, initial values, name in
Hugging Face's format) and the Hugging Face classes that compute it. The plan and the initialization of the modules, the
counts of parameters and FLOPs, and the import and export of Hugging Face folders read it; a test compares it with the
modules. Nothing here imports torch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from configs.architectures import hf, llama, mup, own
from configs.architectures.hf import HfKeys
from configs.architectures.llama import FURTHER, further_block
from configs.architectures.llama_keys import LlamaKeys, n_further
from configs.architectures.own import OwnKeys
from configs.architectures.parts import Described, Family, HfClass, Weight
from configs.plan import PARAMETER_ROLES, Initial, TensorRole

_FAMILIES: dict[str, Family] = {"llama": llama, "hf": hf}
_DESCRIBED: dict[str, Described] = {"llama": llama}

HF_CLASSES: dict[str, HfClass] = {each.model_type: each for family in _DESCRIBED.values() for each in family.HF_CLASSES}
"""Hugging Face's classes by `model_type`."""


def family_of(model: LlamaKeys | HfKeys | OwnKeys) -> Family:
    """The file of the model's architecture; all models of the user's own have one."""
    return _FAMILIES.get(model.architecture, own)


def description_of(model: LlamaKeys) -> Described:
    """The description of the weights of the model's family."""
    return _DESCRIBED[model.architecture]


def all_weights(model: LlamaKeys) -> Iterator[Weight]:
    """The weights of a model, in the order of the forward pass; a tied head is one of them."""
    family = description_of(model)
    yield from family.before_blocks(model)
    for layer in range(model.n_layers):
        yield from (weight.inside(f"layers.{layer}") for weight in family.block(model, layer))
    yield from family.after_blocks(model)


def block_names(model: LlamaKeys) -> list[str]:
    """The names of the blocks by layer; those of modules that predict further tokens count on after the last layer."""
    further = [further_block(depth) for depth in range(n_further(model))]
    return [*(f"layers.{layer}" for layer in range(model.n_layers)), *further]


def own_weights(model: LlamaKeys) -> Iterator[Weight]:
    """The weights of a model, a tied matrix once."""
    return (weight for weight in all_weights(model) if not weight.tied_to)


def stored_tensors(model: LlamaKeys) -> Iterator[Weight]:
    """What a checkpoint has of a model: its weights, a tied matrix once, and its buffers."""
    yield from own_weights(model)
    for layer, block in enumerate(block_names(model)):
        for buffer in description_of(model).buffers(model, layer):
            yield replace(buffer.inside(block), hf=f"model.layers.{layer}.{buffer.hf}")


def tensor_parallel_roles(model: LlamaKeys) -> dict[str, TensorRole]:
    """The role of each module or parameter that has one, by its name."""
    roles: dict[str, TensorRole] = {}
    for layer, block in enumerate(block_names(model)):
        around = description_of(model).around(model, layer)
        roles |= {f"{block}.{module}": role for module, role in around.items()}
    for weight in all_weights(model):
        of_parameter = weight.role in PARAMETER_ROLES
        roles[weight.name if of_parameter else weight.name.rpartition(".")[0]] = weight.role
    return roles


LOAD = "load."
"""Beginning of the name, in a checkpoint, of a router's load in the step before."""


@cache
def init_stds(model: LlamaKeys) -> dict[str, Initial]:
    """How each parameter starts, by name."""
    return {weight.name: _std(model, weight) for weight in own_weights(model)}


def _std(model: LlamaKeys, weight: Weight) -> Initial:
    if weight.start == "log_of_uniform":
        return weight.start
    if weight.start == "ones":
        return None
    if weight.start == "zeros":
        return 0.0
    std = model.init_std * mup.init_scale(model, weight)
    if weight.start == "normal":
        return std
    layer = int(weight.name.split(".")[1]) + (model.n_layers if weight.name.startswith(FURTHER) else 0)
    return std / math.sqrt(2 * (layer + 1))
