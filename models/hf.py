"""A causal language model of `transformers`, as it is: its own modules, parameter names and forward pass, with a plan.

The family's class is built from its config.json on the meta device, and its modules become this module's, so that
parameters keep the family's names. What techniques need is found in it: the decoder layers are the module list with as
many members as the config has layers; embedding, head, ties and the plan of tensor parallelism are what the family
declares.

Four things are Keel's:

* The loss. The family's own forward pass runs, but its head hands the hidden states and its weight to the loss instead
  of multiplying them. A factor that the family puts on its logits is put on the hidden states; one that changes them
  otherwise is refused, never trained without the change; softcapping is a part of the loss.
* Initial values. The family's own `_init_weights` draws each parameter whole, under a generator keyed by (seed, name),
  on a copy of the model of which only this parameter has memory. So no mesh changes the values.
* Buffers, such as rotary frequencies, which `_init_weights` computes in the same way after the meta device.
* Stacked experts compute by grouped products (`models/hf_experts.py`), alike on every mesh.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from configs.errors import ConfigError
from configs.plan import Plan, TensorRole
from configs.schema import HfModel
from models.documents import Documents, NumberedDocuments
from models.hf_experts import compute_experts_in_groups
from models.hf_stages import Cuts, StageEnd, find_cuts, without_tensors

Loss = Callable[..., Tensor]  # (hidden (batch, seq, dim), head weight (vocab, dim)) -> loss

_SAVE_OPS = ("aten.mm", "aten.addmm", "*._scaled_dot_product_*attention*")
"""Not topk: some routers change its result in place, so it must be computed again. So the experts' products, of
grouped_mm, are not saved either: if a recomputed score differed in its last bit, another choice of experts would read
them."""
_MIXERS = re.compile("attn|attention|mixer|mamba|conv|ssm|delta|recurrent", re.IGNORECASE)
_RATES = re.compile("drop|jitter")
_ROUTER_LOSSES = ("output_router_logits",)


class HfCausalLm(nn.Module):
    """The model; `config` is the job file's `[model]`."""

    family: Any
    """The family's own object, which is no module of this one: only its children are."""
    _head: Any

    def __init__(self, config: HfModel) -> None:
        """Build it, on the meta device whatever the context.

        Raises:
            ConfigError: transformers cannot build it, or Keel cannot train it as it is; the message says why.
        """
        super().__init__()
        self.config = config
        with torch.device("meta"):
            family = built(config)
        # The family's object runs the forward pass, but its modules are registered here, under its own names.
        self.__dict__["family"] = family
        for name, child in family.named_children():
            self.add_module(name, child)
        from models.hf_attention import register

        register(family)
        self.names = _Names(family, config)
        self._experts = compute_experts_in_groups(family, self.names.blocks)
        self.mask: Callable[[Documents, torch.dtype], Any] = _numbered
        """What layers of plain causal attention get in place of a mask; replaced with their `attend`."""
        self._loss: Loss | None = None
        # As an attribute it would be a second name of the head's parameters.
        self.__dict__["_head"] = family.get_output_embeddings()
        self._head.forward = self._head_or_loss
        self._head.compute = self._computed
        """The head's computation for a loss or None; tensor parallelism replaces it."""
        self._result: Tensor | None = None
        self._received: Tensor | None = None
        """What a pipeline's later stage is given, while it runs."""
        self._gone: frozenset[str] = frozenset()
        """Modules that this pipeline stage does not have."""
        self._scale, self._softcap = _effect_on_logits(self, family)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        loss: Loss | None = None,
    ) -> Tensor:
        """Compute the logits or the loss.

        Args:
            tokens: (batch, seq) ids; for a later pipeline stage, the previous stage's output, (batch, seq, dim).
            positions: (1 or batch, seq). Default: 0, 1, 2, ...
            documents: restricts attention to tokens of the same document; `positions` restart in each.
            loss: called with the last hidden states and the head's weight.

        Returns:
            Logits (batch, seq, vocab), or the loss if `loss` is given. A pipeline stage other than the last returns its
            last layer's output, (batch, seq, dim).
        """
        from models.hf_attention import reading

        self._loss = loss
        given = {"input_ids": tokens, "position_ids": positions}
        has_parts = self._has_parts()
        if self._gone and documents is None and not has_parts:
            # A pipeline's positions are then 0, 1, 2, ..., which every family counts, and not every one is given.
            given["position_ids"] = None
        if self.names.embedding in self._gone:
            self._received = tokens
            del given["input_ids"]
            # What an earlier stage has computed of it is received; some families change theirs in place.
            given["inputs_embeds"] = torch.zeros_like(tokens)
        mask = None if documents is None else self.mask(documents, self._head.weight.dtype)
        try:
            with reading(documents, mask, has_parts and self.mask is _numbered):
                output = self.family.forward(**given, use_cache=False, return_dict=True)
            return output.logits if self._result is None else self._result
        except StageEnd as end:
            return end.hidden
        finally:
            self._loss = None
            self._result = None
            self._received = None

    def leave_out(self, names: Iterable[str]) -> None:
        """Remove the modules that this pipeline stage does not have; others without parameters take their places."""
        cuts = cuts_of(self.config)
        self._gone = frozenset(names)
        blocks = self.names.blocks
        first = next(number for number, name in enumerate(blocks) if name not in self._gone)
        for name in sorted(self._gone, reverse=True):  # modules inside of others first
            owner_name, _, child = name.rpartition(".")
            owner = self.get_submodule(owner_name)
            module = owner.get_submodule(child)
            if name in blocks:
                forward = self._passed if blocks.index(name) < first else _end
                owner._modules[child] = without_tensors(module, forward)
            elif name in cuts.before:
                owner._modules[child] = without_tensors(module, partial(self._blank, name))
            else:
                owner._modules[child] = None
        self._sync_family()

    def _sync_family(self) -> None:
        """Let the family's own object, which is no module of this one, have the same children."""
        for name in self.family._modules:
            self.family._modules[name] = self._modules[name]

    def _passed(self, *_: Any, **__: Any) -> Any:
        """The forward pass of an earlier stage's layer: what that stage has sent."""
        assert self._received is not None
        return cuts_of(self.config).returned(self._received)

    def _blank(self, name: str, *_: Any, **__: Any) -> Tensor:
        """The forward pass of a module before the layers of an earlier stage; its output is not used."""
        assert self._received is not None
        return cuts_of(self.config).blank(name, self._received)

    def _head_or_loss(self, hidden: Tensor) -> Tensor:
        """The head's forward pass: its logits, or the loss in their place, to which the family's factor is applied."""
        if self._loss is None:
            return self._head.compute(hidden, None)
        loss = partial(self._loss, softcap=self._softcap) if self._softcap else self._loss
        self._result = self._head.compute(hidden if self._scale == 1.0 else hidden * self._scale, loss)
        return self._result

    def _computed(self, hidden: Tensor, loss: Loss | None) -> Tensor:
        head = self._head
        if loss is None:
            return nn.functional.linear(hidden, head.weight, head.bias)
        return loss(hidden, head.weight) if head.bias is None else loss(hidden, head.weight, bias=head.bias)

    @property
    def plan(self) -> Plan:
        """How techniques may split the model; see `Plan`."""
        names = self.names
        cuts = cuts_of(self.config)
        gone = self._gone_prefixes
        blocks, before, after, mixers = (
            tuple(name for name in part if not f"{name}.".startswith(gone))
            for part in (names.blocks, cuts.before, cuts.after, names.mixers)
        )
        groups = tuple((block,) for block in blocks)
        ends = tuple(tuple(name for name in part if name in (names.embedding, names.head)) for part in (before, after))
        return Plan(
            blocks=blocks,
            first_block=names.blocks.index(blocks[0]),
            n_blocks=len(names.blocks),
            can_be_cut=False,
            before_blocks=before,
            after_blocks=after,
            fsdp_groups=groups if names.is_tied else tuple(filter(None, (ends[0], *groups, ends[1]))),
            attention=self._attention(),
            mixers=mixers,
            experts=tuple(name for name in self._experts.names if not name.startswith(gone)),
            routers=(),
            tensor_parallel={name: role for name, role in names.roles.items() if not f"{name}.".startswith(gone)},
            save_ops=_SAVE_OPS,
            cannot_split=names.why_not_split(),
            why_no_pipeline=cuts.why_not,
            why_not_distributed=self._experts.why_not and f"{self.config.model_type} {self._experts.why_not}",
            can_cache=False,
        )

    @property
    def _gone_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in self._gone)

    def _attention(self) -> tuple[str, ...]:
        """The modules whose attention can be replaced, each of which gets its `attend`."""
        from models.hf_attention import attend

        names = tuple(name for name in cuts_of(self.config).attention if not f"{name}.".startswith(self._gone_prefixes))
        for name in names:
            vars(self.get_submodule(name)).setdefault("attend", attend)
        return names

    def _has_parts(self) -> bool:
        """Whether context parallelism has replaced attention, so that the model computes on parts of sequences."""
        from models.hf_attention import attend

        first = next((vars(module)["attend"] for module in self.modules() if "attend" in vars(module)), attend)
        return first is not attend

    def initial_values(self, seed: int) -> Callable[[str], Tensor]:
        """Return what draws a parameter, by its name: whole, float32, on the CPU."""
        return partial(self._initializer.values, seed)

    def init_buffers(self) -> None:
        """Compute the buffers after the model left the meta device; they keep the dtypes that the family gives them."""
        for name, buffer in list(self.named_buffers()):
            owner_name, _, attribute = name.rpartition(".")
            owner = self.get_submodule(owner_name)
            is_persistent = attribute not in owner._non_persistent_buffers_set
            value = self._initializer.values(0, name).to(buffer.device)
            owner.register_buffer(attribute, value, persistent=is_persistent)

    @property
    def _initializer(self) -> "_Initializer":
        if "initializer" not in self.__dict__:
            self.__dict__["initializer"] = _Initializer(self.config)
        return self.__dict__["initializer"]


def _end(hidden: Tensor, *_: Any, **__: Any) -> Any:
    """The forward pass of a later stage's layer."""
    raise StageEnd(hidden)


@cache
def cuts_of(config: HfModel) -> Cuts:
    """How a model can be cut into pipeline stages.

    Raises:
        ConfigError: its forward pass draws random numbers, whatever the config says of dropout.
    """
    from models.hf_attention import reading, watching

    model = HfCausalLm(config)
    names = model.names
    with reading(), watching() as seen:
        found = find_cuts(model.family, names.blocks, names.embedding, names.head, config.dim)
    modules = seen.modules if found.has_ended else []
    attention = tuple(name for name, module in model.family.named_modules() if module in modules)
    found = replace(
        found,
        attention=attention,
        kv_heads=seen.kv_heads,
        windows=frozenset(seen.windows),
        patterns=frozenset(seen.patterns),
    )
    if found.random:
        raise ConfigError(
            f"{config.model_type} draws random numbers in its forward pass ({found.random}), which would not be the "
            "same on every mesh; it can't be trained"
        )
    if found.why_not:
        return replace(found, why_not=f"{config.model_type} {found.why_not}")
    return found


# --------------------------------------------------------------------------- building


def built(config: HfModel) -> Any:
    """Build a family's own model of plain transformers, on the device of the context, with float32 parameters.

    Raises:
        ConfigError: transformers cannot build it, or Keel cannot train it as it is.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f'model.architecture is "hf", but transformers cannot be imported ({error}): pip install '
            "'transformers>=5.17'"
        ) from None
    fields = dict(config.fields)
    kind = fields.pop("model_type")
    try:
        described = transformers.CONFIG_MAPPING[kind].from_dict(fields)
        family = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        _require_trainable(family)
        return family
    except ConfigError:
        raise
    except Exception as error:  # whatever the family's code makes of a wrong config
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"transformers cannot build this {kind} (model.hf, model.hf_overrides): {reason}") from None


def _require_trainable(family: Any) -> None:
    """Check what a config decides.

    Raises:
        ConfigError: dropout, whose random numbers a mesh would change, or a loss of its own.
    """
    fields = family.config.to_dict()
    kind = family.config.model_type
    if any(map(_drops, family.modules())):
        rates = {name: value for name, value in fields.items() if _RATES.search(name) and isinstance(value, float)}
        raise ConfigError(
            f"this {kind} has dropout or jitter, whose random numbers would not be the same on every mesh; set it to "
            f"0.0 in model.hf_overrides ({', '.join(f'{name} = {rate}' for name, rate in rates.items() if rate > 0)})"
        )
    for name in _ROUTER_LOSSES:
        if fields.get(name):
            raise ConfigError(
                f"{name} asks for the auxiliary loss of the routers, which Keel does not add for this architecture; "
                f"set model.hf_overrides.{name} = false"
            )


def _drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers: it is dropout, or has a rate for its attention or its router's noise."""
    rates = [value for name, value in vars(module).items() if _RATES.search(name) and isinstance(value, float)]
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(rate > 0 for rate in rates)


def _effect_on_logits(model: HfCausalLm, family: Any) -> tuple[float, float]:
    """What the family's forward pass does to its logits, found by running it without the decoder.

    Returns:
        The factor on them, and the cap of softcapping; 0: there is none.

    Raises:
        ConfigError: it changes them otherwise; Keel's loss never sees logits, so the change would be lost.
    """
    kind = model.config.model_type
    with torch.device("meta"):
        hidden = torch.empty(1, 2, model._head.weight.shape[1])
        tokens = torch.zeros(1, 2, dtype=torch.int64)
    logits = torch.tensor([[[1.0, -2.0, 0.5], [1e4, -1e4, 4.0]]], dtype=torch.float64, device="cpu")
    base = family.get_submodule(model.names.decoder)
    compute = model._head.compute
    base.forward = lambda *_, **__: _DecoderOutput(hidden)
    model._head.compute = lambda *_: logits
    try:
        returned = model(tokens)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"{kind} computes more than its decoder and its head ({reason}); it can't be trained"
        ) from None
    finally:
        del base.forward
        model._head.compute = compute
    found = {name: value for name in _LOGIT_FIELDS if (value := getattr(family.config, name, None)) not in (None, 1.0)}
    for cap in found.values():
        if torch.allclose(returned.double(), cap * torch.tanh(logits / cap), rtol=1e-6, atol=0.0):
            return 1.0, float(cap)
    scale = float(returned[0, 0, 0])
    is_exact = returned.dtype == logits.dtype or scale == 1.0
    if is_exact and torch.allclose(returned.double(), logits * scale, rtol=1e-7, atol=0.0):
        return scale, 0.0
    cause = f" ({', '.join(f'{name} = {value}' for name, value in found.items())})" if found else ""
    raise ConfigError(
        f"{kind} changes the logits after its head{cause}, which the loss in chunks would leave out; it can't be "
        "trained as it is"
    )


class _DecoderOutput:
    """What a decoder returns: its last hidden states, and None for all that it may return besides."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


_LOGIT_FIELDS = ("final_logit_softcapping", "logits_soft_cap")


def _numbered(documents: Documents, _dtype: torch.dtype) -> NumberedDocuments:
    return documents.numbered()


class _Names:
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

        A module with a packed matrix (gate and up in one, which no contiguous cut separates) stays whole, with all that
        is in it: each rank computes all of it. So do experts.
        """
        found: dict[str, TensorRole] = {}
        for name, style in self._split_styles().items():
            is_parameter = name not in self._modules
            role = _PARAMETER_ROLES.get(style) if is_parameter else _ROLES.get(style)
            if role:
                found[name] = role
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


# --------------------------------------------------------------------------- initial values


class _Initializer:
    """Draws single parameters of a family, whole, by the family's own rules."""

    def __init__(self, config: HfModel) -> None:
        with torch.device("meta"):
            self._family = built(config)
        for module in self._family.modules():  # what from_config has set would keep the rules from running
            module.__dict__.pop("_is_hf_initialized", None)
        self._rules = self._touched()
        tensors = [*self._family.named_parameters(), *self._family.named_buffers()]
        without_rule = [name for name, _ in tensors if name not in self._rules]
        self._constructed = _small_tensors(config, without_rule) if without_rule else {}

    def values(self, seed: int, name: str) -> Tensor:
        """The initial values of a parameter or a buffer, by name.

        Raises:
            ConfigError: the family has no rule for it.
        """
        if name in self._constructed:
            return self._constructed[name].clone()
        if name not in self._rules:
            raise ConfigError(
                f"{self._family.config.model_type} has no rule for the initial values of {name} (_init_weights), "
                "so it can't be trained"
            )
        owner_name, _, attribute = name.rpartition(".")
        owner = self._family.get_submodule(owner_name)
        is_parameter = attribute in owner._parameters
        held: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        before = held[attribute]
        whole = _unset(torch.empty(before.shape, dtype=before.dtype, device="cpu"))
        held[attribute] = nn.Parameter(whole, requires_grad=False) if is_parameter else whole
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
                for module, initialize in self._rules.get(name, []):
                    initialize(module)
            return held[attribute].detach()
        except NotImplementedError as error:  # it reads another tensor, which has no memory
            raise ConfigError(
                f"the rule of {self._family.config.model_type} for the initial values of {name} needs the values of "
                f"other parameters ({error}), so it can't be trained"
            ) from None
        finally:
            held[attribute] = before

    def _touched(self) -> dict[str, list[tuple[nn.Module, Callable]]]:
        """The rules that write each parameter or buffer, in the order in which transformers runs them.

        Most write their own module's; some, such as GPT-2's of the residual matrices, those of modules inside.
        """
        tensors = [*self._family.named_parameters(), *self._family.named_buffers()]
        rules: dict[str, list[tuple[nn.Module, Callable]]] = {}
        with torch.no_grad(), torch.device("meta"):
            for module, initialize in _rules_of(self._family, self._family._init_weights):
                versions = [tensor._version for _, tensor in tensors]
                initialize(module)
                for (name, tensor), version in zip(tensors, versions, strict=True):
                    if tensor._version != version:
                        rules.setdefault(name, []).append((module, initialize))
        return rules


def _small_tensors(config: HfModel, names: list[str]) -> dict[str, Tensor]:
    """The values that a family's constructor, and not a rule, gives to parameters and buffers with few elements."""
    with torch.random.fork_rng(devices=[]), _SmallInMemory():
        torch.manual_seed(0)
        family = built(config)
    tensors = dict(family.named_parameters()) | dict(family.named_buffers())
    return {name: tensors[name].detach() for name in names if not tensors[name].is_meta}


class _SmallInMemory(TorchFunctionMode):
    """Lets a constructor compute with the tensors of few elements; the others are on the meta device."""

    MOST_ELEMENTS = 4096

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            sizes = [size for each in args for size in (each if isinstance(each, (tuple, list)) else (each,))]
            has_sizes = func not in (torch.tensor, torch.as_tensor, torch.arange, torch.linspace)
            is_large = has_sizes and prod(size for size in sizes if type(size) is int) > self.MOST_ELEMENTS
            kwargs["device"] = "meta" if is_large else "cpu"
        return func(*args, **kwargs)


def _rules_of(module: nn.Module, initialize: Callable) -> Iterator[tuple[nn.Module, Callable]]:
    """Modules with the rule that applies to each, inner ones first; a model inside a model has rules of its own."""
    for child in module.children():
        own = getattr(child, "_init_weights", None)
        yield from _rules_of(child, own if callable(own) else initialize)
    yield module, initialize


def _unset(tensor: Tensor) -> Tensor:
    """Mark every element as not initialized."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()
