"""Where the parts of a family's model are, and how its own plan of tensor parallelism splits them."""

import re
from functools import cached_property
from typing import Any

from torch import nn

from configs.errors import ConfigError
from configs.plan import TensorRole
from configs.schema import HfModel

_MIXERS = re.compile("attn|attention|mixer|mamba|conv|ssm|delta|recurrent", re.IGNORECASE)


class Names:
    """Where the parts of a family's model are."""

    def __init__(self, family: Any, config: HfModel) -> None:
        """Find them.

        Raises:
            ConfigError: something is missing, or shared in a way that techniques would break.
        """
        kind = config.model_type
        modules = dict(family.named_modules())
        by_module = {module: name for name, module in modules.items()}
        lists = [name for name, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == config.n_layers]
        if not lists:
            raise ConfigError(f"{kind} has no list of {config.n_layers} decoder layers, which are what Keel shards")
        embedding = family.get_input_embeddings()
        head = family.get_output_embeddings()
        if embedding is None or type(head) is not nn.Linear:
            raise ConfigError(f"{kind} has no embedding or no head of its own, so no loss can be computed in chunks")
        self.blocks = tuple(f"{lists[0]}.{number}" for number in range(config.n_layers))
        self.decoder = lists[0].partition(".")[0]
        """The module that the family calls before its head; `base_model_prefix` has another name in Llama 4."""
        self.embedding = by_module[embedding]
        self.head = by_module[head]
        self._modules = modules
        self.is_tied = embedding.weight is head.weight
        self._kind = kind
        self._family = family
        self.mixers = tuple(self._mixer(modules[block], block) for block in self.blocks)
        self._check_ties(family, kind)
        for name, style in self._split_styles().items():
            if style == "mla_kv_a_proj":  # its last features are the rotated part of the keys, which all heads share
                modules[name].tail = family.config.qk_rope_head_dim

    @cached_property
    def roles(self) -> dict[str, TensorRole]:
        """The roles of tensor parallelism, by module or parameter, from the family's plan.

        Stacked experts that compute by grouped products are split by their inner features (`experts.py`), whatever the
        plan says of them. Other experts, and a module with another packed matrix, stay whole: each rank computes all.
        """
        found: dict[str, TensorRole] = {}
        for name, style in self._split_styles().items():
            is_parameter = name not in self._modules
            role = _PARAMETER_ROLES.get(style) if is_parameter else _ROLES.get(style)
            if role:
                found[name] = role
        for name, module in self._modules.items():
            of_parameters = vars(module).get("tensor_parallel")
            if of_parameters:
                found[name] = "whole_experts"
                found |= {f"{name}.{parameter}": role for parameter, role in of_parameters.items()}
        found[self.embedding] = "whole_embedding"
        found[self.head] = "whole_head"
        return found

    def _split_styles(self) -> dict[str, str]:
        """The styles outside of what stays whole: experts, and the modules that have a packed matrix."""
        styles = self._styles()
        whole = {_kept_whole(name, style) for name, style in styles.items() if style in _LEFT_WHOLE}
        return {
            name: style
            for name, style in styles.items()
            if not any(name == part or name.startswith(f"{part}.") for part in whole)
        }

    def _styles(self) -> dict[str, str]:
        """The family's style for each of its modules and parameters that has one."""
        declared = getattr(self._family.config, "base_model_tp_plan", None) or {}
        prefix = f"{self.decoder}."
        names = [*self._modules, *(name for name, _ in self._family.named_parameters())]
        styles: dict[str, str] = {}
        for pattern, style in declared.items():
            matches = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+")).fullmatch
            styles |= {name: style for name in names if matches(name)}
        return styles

    def why_not_split(self) -> str:
        """Why tensor parallelism can't split this model; "" if it can."""
        if not self._styles():
            return f"{self._kind} has no plan of tensor parallelism (base_model_tp_plan)"
        for name, style in self._split_styles().items():
            module = self._modules.get(name)
            known = _ROLES if module is not None else _PARAMETER_ROLES
            if style not in known:
                return f'the plan of {self._kind} has the style "{style}" for {name}, which Keel does not know'
            is_linear = (known.get(style) or "").startswith(("whole_column", "whole_row"))
            if is_linear and module is not None and type(module) is not nn.Linear:
                return f"{name} of {self._kind} is a {type(module).__name__}, not a plain matrix"
        if forgotten := self._without_a_style():
            return (
                f"the plan of {self._kind} says nothing of {forgotten}, whose gradient would be that of the rank's own "
                "features"
            )
        return ""

    def _without_a_style(self) -> str:
        """A module that computes on a rank's own features, with parameters that the plan leaves out; "" if none does.

        These are norms of single heads beside matrices that are split by heads, and activations that learn. The plans
        of transformers 5.24 forget them in Sarvam's mixture and in Apertus: the loss is right, their gradients are not.
        """
        styles = self._split_styles()
        for name, module in self._modules.items():
            parent, _, own = name.rpartition(".")
            side = re.fullmatch("([qk])_(?:layer)?norm|act_fn", own)
            parameters = dict(module.named_parameters())
            if (
                side is None
                or not parameters
                or name in styles
                or any(f"{name}.{each}" in styles for each in parameters)
            ):
                continue
            beside = (f"{parent}.{side[1]}_proj",) if side[1] else (f"{parent}.up_proj", f"{parent}.c_fc")
            features = [self._modules[each].weight.shape[0] for each in beside if styles.get(each) == "colwise"]
            if features and max(parameter.numel() for parameter in parameters.values()) < features[0]:
                return name
        return ""

    @staticmethod
    def _mixer(block: nn.Module, name: str) -> str:
        """The module of a block that mixes tokens; the block itself if none is called like one."""
        return next((f"{name}.{child}" for child, _ in block.named_children() if _MIXERS.search(child)), name)

    def _check_ties(self, family: nn.Module, kind: str) -> None:
        first: dict[int, str] = {}
        for name, parameter in family.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if other != name and {other, name} != {f"{self.embedding}.weight", f"{self.head}.weight"}:
                raise ConfigError(
                    f"{kind} shares {other} with {name}, which techniques would separate; it can't be trained"
                )
        own = [name for name, _ in family.named_parameters(recurse=False)]
        if own:
            raise ConfigError(f"{kind} has parameters outside of its modules ({', '.join(own)}); it can't be trained")


_ROLES: dict[str, TensorRole | None] = {
    "colwise": "whole_column",
    "colwise_gather_output": "whole_column_joined",
    "colwise_rep": "whole_column_joined",
    "rowwise": "whole_row",
    "rowwise_split_input": "whole_row_own_part",
    "rowwise_rep": "whole_row_own_part",
    "embedding_rowwise": "whole_embedding",
    "replicated_with_grad_allreduce": "whole_sum_gradients",
    "mla_kv_a_proj": "whole_tail_shared",
    "replicate": None,
    "local_params": None,
}
"""transformers' styles of modules; None: nothing to do."""
_PARAMETER_ROLES: dict[str, TensorRole | None] = {"colwise": "whole_vector", "replicate": None}
_EXPERTS = ("moe_tp_experts", "moe_identity_expert")
_LEFT_WHOLE = ("packed_colwise", "packed_rowwise", *_EXPERTS)


def _kept_whole(name: str, style: str) -> str:
    """The module that stays whole because of a style: experts themselves; for a packed matrix the module around it."""
    return name if style in _EXPERTS else name.rpartition(".")[0]
