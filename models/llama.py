"""Llama 2 and 3.x: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; with options, most of today's families.

Each option is a key of `configs/architectures/llama.py`, and a line or two here. Plain single-device PyTorch: no mesh,
rank or process group is known here. Modules and weights are named and laid out as in Hugging Face's classes (rotary
halves split, not interleaved; names without the leading "model."), so that an export is a rename.

One thing is unusual: `forward` takes the loss as an argument. The head then passes its hidden states and weight to the
loss instead of multiplying them, so that the full logits (2 GiB for 4,096 tokens of a 128K vocabulary in float32)
never have to exist.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures import init_stds, tensor_parallel_roles
from configs.architectures.llama import ATTENTION, further_block, mixer
from configs.architectures.llama_keys import embedding_scale, n_further, rope_dim
from configs.architectures.mup import width_ratio
from configs.architectures.parts import head_dim
from configs.plan import Initial, Plan
from configs.schema import Model
from models.attention import Mask, document_mask
from models.block import Block
from models.documents import Documents, has_kernel
from models.moe import Load, MixtureOfExperts
from models.multi_token import MultiToken
from models.norm import OffsetNorm, norm
from models.rotary import RotaryEmbedding

Loss = Callable[..., Tensor]
"""(hidden (batch, seq, dim), head weight (vocab, dim)) -> loss; other `targets` (batch, seq) may be given by name."""


class Head(nn.Linear):
    """The output projection; if it is given a loss, it leaves the multiplication to the loss."""

    def forward(self, hidden: Tensor, loss: Loss | None = None) -> Tensor:
        """hidden: (batch, seq, dim) -> logits: (batch, seq, vocab), or the loss's return value."""
        return F.linear(hidden, self.weight) if loss is None else loss(hidden, self.weight)


_PRODUCTS = ("aten.mm", "aten._scaled_mm")
_SAVE_OPS = (*_PRODUCTS, "*._scaled_dot_product_*attention*", "_c10d_functional.reduce_scatter_tensor")
# The choice of experts (topk) is saved, not recomputed: a recomputed score may differ in its last bit if it was
# compiled differently, and a different choice would then read another expert's rows out of the saved outputs.
_SAVE_OPS_OF_EXPERTS = ("keel.grouped_mm", "keel.grouped_mm_float8", "aten.topk")
_SAVE_OPS_OF_DELTA = ("keel.delta_rule",)


class Llama(nn.Module):
    """The model; `config` is the job file's `[model]`.

    A pipeline stage is this model with some layers removed. `embed_tokens` is None unless it is the first stage, or the
    last one and tied to the head or used by `multi_token`; `norm` and `lm_head` are None, and `multi_token` is empty,
    unless it is the last. Everything else keeps its name.
    """

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | OffsetNorm | None
    lm_head: Head | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = norm(config, config.dim)
        self.lm_head = Head(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.multi_token = nn.ModuleDict({str(i): MultiToken(config, i) for i in range(n_further(config))})
        self.embedding_scale = embedding_scale(config)
        self.output_multiplier = width_ratio(config)
        self.rotary = RotaryEmbedding(rope_dim(config), config.rope_theta, config.rope_scaling)
        near = config.window_rope_theta
        self.window_rotary = RotaryEmbedding(rope_dim(config), near, None) if near else None
        self.mask: Callable[[Documents, torch.dtype], Mask] = self._mask
        """Maps documents and the activations' dtype to the mask that each block's `attend` takes; replaced with it."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        loss: Loss | None = None,
        further: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits or the loss.

        Args:
            tokens: (batch, seq) ids; for a later pipeline stage, the previous stage's output, (batch, seq, dim).
            positions: (1 or batch, seq). Default: 0, 1, 2, ...
            documents: restricts attention to earlier tokens of the same document. Default: all earlier tokens.
            loss: called with the normed hidden states and the head's weight.
            further: (batch, seq, depth, 2), the token that each module that predicts further tokens sees at each
                token, and its target; negative: unknown. With it the gradients have the loss of these modules; `loss`
                takes `targets`.

        Returns:
            Logits (batch, seq, vocab), or the loss if `loss` is given. A pipeline stage other than the last returns its
            last layer's output, (batch, seq, dim).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = self.rotary(positions)
        angles_near = angles if self.window_rotary is None else self.window_rotary(positions)
        x = tokens if tokens.is_floating_point() else self._embedded(tokens)
        mask = None if documents is None else self.mask(documents, x.dtype)
        numbers = documents.numbers if documents is not None and "delta" in self.config.layers else None
        for block in cast("dict[str, Block]", self.layers).values():
            x, load = block(x, *(angles_near if block.window else angles), numbers if block.is_delta else mask)
            _record(block, load)
        if self.norm is None or self.lm_head is None:
            return x
        x = self.norm(x)
        result = self._headed(x, loss)
        if loss is None or further is None or not self.multi_token:
            return result
        carried = self._further_loss(x, further, loss, (angles, angles_near), mask)
        return result + (carried - carried.detach())  # 0, which has the gradients

    def _further_loss(
        self,
        x: Tensor,
        further: Tensor,
        loss: Loss,
        angles: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        mask: Mask | None,
    ) -> Tensor:
        """The weighted loss of the modules that predict further tokens, a scalar.

        Args:
            x: (batch, seq, dim), normed.
            further, loss: as for `forward`.
            angles: of layers that see all tokens, and of those with a window.
            mask: as for the blocks.
        """
        total = torch.zeros((), device=x.device)
        for depth, module in enumerate(cast("dict[str, MultiToken]", self.multi_token).values()):
            seen, targets = further[:, :, depth].unbind(-1)
            near = bool(module.block.window)
            x, normed, load = module(x, self._embedded(seen.clamp(min=0)), *angles[near], mask)
            _record(module.block, load)
            found = self._headed(normed, partial(loss, targets=targets))
            module.record(found, targets)
            total = total + found
        return total * (self.config.multi_token.loss_weight / len(self.multi_token))

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        x = self.embed_tokens(tokens)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _headed(self, x: Tensor, loss: Loss | None) -> Tensor:
        assert self.lm_head is not None
        return self.lm_head(x if self.output_multiplier == 1.0 else x * self.output_multiplier, loss)

    def _mask(self, documents: Documents, dtype: torch.dtype) -> Mask:
        if has_kernel(documents.ids.device.type, dtype, head_dim(self.config)):
            return documents.numbered()
        return document_mask(documents.ids)

    def set_rope(self, config: Model) -> None:
        """Turn positions by the rope_theta and rope_scaling of another stage of the run from now on."""
        self.rotary.theta = config.rope_theta
        self.rotary.scaling = config.rope_scaling
        self.rotary.init_buffers()

    @property
    def plan(self) -> Plan:
        """How techniques may split the model; see `Plan`."""
        further = tuple(f"multi_token.{name}" for name in self.multi_token)
        inner = tuple(further_block(int(name)) for name in self.multi_token)
        there = dict(self.named_children())
        blocks = tuple(f"layers.{name}" for name in self.layers)
        mixers = tuple(f"layers.{name}.{mixer(self.config, int(name))}" for name in self.layers)
        mixers += tuple(f"{block}.{ATTENTION}" for block in inner)
        recurrent = tuple(name for name in mixers if not name.endswith(ATTENTION))
        before = tuple(name for name in ("embed_tokens",) if name in there)
        after = (*further, *(name for name in ("norm", "lm_head") if name in there))  # the head is the last
        # A matrix that is used at both ends of the forward pass stays in the root's group, gathered throughout.
        is_shared = self.config.tie_embeddings or n_further(self.config) > 0
        groups = tuple((block,) for block in (*blocks, *further))
        mixtures = [
            f"{name}.mlp" for name in (*blocks, *inner) if isinstance(self.get_submodule(name).mlp, MixtureOfExperts)
        ]
        return Plan(
            blocks=blocks,
            first_block=int(next(iter(self.layers))),
            n_blocks=self.config.n_layers,
            can_be_cut=True,
            before_blocks=before,
            after_blocks=after,
            fsdp_groups=groups if is_shared else tuple(filter(None, (before, *groups, after))),
            attention=tuple(name for name in mixers if name.endswith(ATTENTION)),
            mixers=mixers,
            experts=tuple(f"{mixture}.experts" for mixture in mixtures),
            routers=tuple(f"{mixture}.router" for mixture in mixtures),
            n_counted=self.config.n_experts or 0,
            has_losses_of_layers=bool(self.config.n_experts) and self.config.router.has_auxiliary_loss,
            tensor_parallel={
                name: role
                for name, role in tensor_parallel_roles(self.config).items()
                if ".".join(name.split(".")[:2]) in (*before, *blocks, *after)
            },
            tied=before if is_shared else (),
            further_blocks=further,
            save_ops=_SAVE_OPS + (_SAVE_OPS_OF_EXPERTS if mixtures else ()) + (_SAVE_OPS_OF_DELTA if recurrent else ()),
            recurrent=recurrent,
        )

    def init_std(self, name: str) -> Initial:
        """How a parameter starts."""
        return init_stds(self.config)[name]


def _record(block: Block, load: Load | None) -> None:
    """Count the experts' load outside the block, which activation checkpointing runs twice; validation is not."""
    if load is not None and torch.is_grad_enabled():
        cast(MixtureOfExperts, block.mlp).router.record(load)
