"""A causal language model of `transformers`, as it is: its own modules, parameter names and forward pass, with a plan.

The family's class is built from its config.json on the meta device, and its modules become this module's, so that
parameters keep the family's names. What techniques need is found in it: the decoder layers are the module list with as
many members as the config has layers; embedding, head, ties and the plan of tensor parallelism are what the family
declares.

Five things are Keel's:

* The loss. The family's own forward pass runs, but its head hands the hidden states and its weight to the loss instead
  of multiplying them. A factor that the family puts on its logits is put on the hidden states; one that changes them
  otherwise is refused, never trained without the change; softcapping is a part of the loss.
* Attention, where the family computes torch's own (`attention.py`): documents stay apart, and sequences may be split.
* Stacked experts compute by grouped products (`experts.py`), alike on every mesh.
* Initial values. The family's own `_init_weights` draws each parameter whole, under a generator keyed by (seed, name),
  on a copy of the model of which only this parameter has memory (`initial_values.py`). So no mesh changes the values.
* Buffers, such as rotary frequencies, which `_init_weights` computes in the same way after the meta device. Frequencies
  that depend on the length of sequences are those of each forward pass alone (`rotation.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.plan import Plan
from configs.schema import HfModel
from models.documents import Documents, NumberedDocuments
from models.hf.experts import compute_experts_in_groups, give_all_a_gradient
from models.hf.family import built
from models.hf.initial_values import Initializer
from models.hf.names import Names
from models.hf.rotation import DynamicRotations
from models.hf.stages import Cuts, StageEnd, find_cuts, without_tensors

Loss = Callable[..., Tensor]  # (hidden (batch, seq, dim), head weight (vocab, dim)) -> loss

_SAVE_OPS = ("aten.mm", "aten.addmm", "*._scaled_dot_product_*attention*")
"""Not topk: some routers change its result in place, so it must be computed again. So the experts' products, of
grouped_mm, are not saved either: if a recomputed score differed in its last bit, another choice of experts would read
them."""


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
        from models.hf.attention import register

        register(family, config)
        self.rotations = DynamicRotations(family)
        self.names = Names(family, config)
        self._experts = compute_experts_in_groups(family, self.names.blocks)
        give_all_a_gradient(family, self.names.blocks, self._experts.names)
        self._counters, self._n_counted = self._find_counters()
        self.mask: Callable[[Documents, torch.dtype], Any] = _numbered
        """What layers of plain causal attention get in place of a mask; replaced with their `attend`."""
        self.places: Callable[[int, torch.device], tuple[Tensor, int]] | None = None
        """See `configs.plan.Attention`; context parallelism sets it."""
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
        from models.hf.attention import reading

        self.rotations.set_length(tokens.shape[1])  # where that matters, the check refuses parts and documents
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
        places, length = self.places(tokens.shape[1], tokens.device) if self.places else (None, 0)
        try:
            with reading(documents, mask, has_parts, places, length):
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
            counters=tuple(name for name in self._counters if not name.startswith(gone)),
            n_counted=self._n_counted,
            tensor_parallel={name: role for name, role in names.roles.items() if not f"{name}.".startswith(gone)},
            save_ops=_SAVE_OPS,
            cannot_split=names.why_not_split(),
            why_no_pipeline=cuts.why_not,
            why_not_distributed=self._experts.why_not and f"{self.config.model_type} {self._experts.why_not}",
            can_cache=False,
        )

    def _find_counters(self) -> tuple[tuple[str, ...], int]:
        """The modules that count the tokens of their experts, one in a layer and with one number of experts: that."""
        experts: dict[str, Any] = {name: self.get_submodule(name) for name in self._experts.names}
        owners = [block for block in self.names.blocks for name in experts if name.startswith(f"{block}.")]
        numbers = {module.num_experts for module in experts.values()}
        if len(set(owners)) < len(experts) or len(numbers) != 1:
            return (), 0
        return tuple(experts), numbers.pop()

    @property
    def _gone_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in self._gone)

    def _attention(self) -> tuple[str, ...]:
        """The modules whose attention can be replaced, each of which gets its `attend`."""
        from models.hf.attention import attend

        names = tuple(name for name in cuts_of(self.config).attention if not f"{name}.".startswith(self._gone_prefixes))
        for name in names:
            vars(self.get_submodule(name)).setdefault("attend", attend)
        return names

    def _has_parts(self) -> bool:
        """Whether context parallelism has replaced attention, so that the model computes on parts of sequences."""
        from models.hf.attention import attend

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
        first = next(chain(self.buffers(), self.parameters()))
        for name in self._experts.names:
            if not name.startswith(self._gone_prefixes):
                experts: Any = self.get_submodule(name)
                experts.tokens_per_expert = torch.zeros(experts.num_experts, dtype=torch.int64, device=first.device)

    @property
    def _initializer(self) -> "Initializer":
        if "initializer" not in self.__dict__:
            self.__dict__["initializer"] = Initializer(self.config)
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
    from models.hf.attention import reading, watching

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
        has_own_attention=seen.is_own,
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
