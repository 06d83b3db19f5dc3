"""The activations that a block keeps from the forward to the backward pass, by the way it is checkpointed."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from configs.layout import expert_dim, head_dim, is_mixture, layer_numbers, n_kv_heads
from configs.schema import ActivationCheckpoint, Config
from trainer.planning.states import BYTES


@dataclass(frozen=True)
class Block:
    """Widths of a block's tensors, in elements per token on one tensor-parallel rank."""

    stream: float
    """The residual stream: a slice of the sequence under tensor parallelism."""
    normed: float
    """Input of the column-parallel matrices: the whole sequence on each rank."""
    query: float
    kv: float
    ffn: float
    """The inside of the feed-forward, or of all experts that a token goes through."""
    statistics: float
    """Attention's logsumexp of each head, float32."""
    routed: float = 0.0
    """One row for each expert that the token is sent to."""
    unread: float = 0.0
    """Inputs of frozen matrices, which no gradient needs."""

    def everything(self, compiled: bool) -> float:
        """Kept without checkpointing: both sums of the residual stream, both norms' outputs, q, k, v and the
        attention's output, gate, up, silu(gate) and its product with up (the compiler recomputes silu(gate)); the
        experts' inputs, and their outputs both sorted by expert and by token."""
        attention = 2 * self.query + 2 * self.kv + self.statistics
        inside = (3 if compiled else 4) * self.ffn + 3 * self.routed
        return 2 * self.stream + 2 * self.normed + attention + inside - self.unread

    def in_backward(self, config: Config) -> float:
        """Alive while its gradients are computed, besides its input: everything, recomputed tensors included, and the
        gradients of the stream and of the feed-forward's inside."""
        compiled = config.compile.enable
        return self.everything(compiled) + self.stream + (1 if compiled else 2) * self.ffn

    def kept(self, config: Config, checkpointed: bool) -> float:
        """Kept from the forward to the backward pass, counting its output instead of its input."""
        checkpointing = config.activation_checkpoint
        everything = self.everything(config.compile.enable)
        if not checkpointed:
            return everything
        if checkpointing.mode == "budget":
            return self.stream + checkpointing.memory_budget * (everything - self.stream)
        if checkpointing.mode == "full":
            return self.stream
        return self.stream + self._saved(checkpointing, config.compile.enable)

    def _saved(self, config: ActivationCheckpoint, compiled: bool) -> float:
        """Outputs that `selective` saves; the compiler drops the last matrix's output, which nothing needs."""
        attention = not config.save_ops or any("attention" in op for op in config.save_ops)
        matmuls = not config.save_ops or any("mm" in op for op in config.save_ops)
        last = 0 if compiled else self.stream
        outputs = [self.query, self.kv, self.kv, self.stream, self.ffn, self.ffn, last]  # q k v o gate up down
        saved = sum(outputs[config.save_every_nth_matmul - 1 :: config.save_every_nth_matmul])
        return attention * (self.query + self.statistics) + matmuls * (saved + self.routed)


def block_widths(config: Config, layer: int, tp: int, frozen: AbstractSet[str] = frozenset()) -> Block:
    """`frozen`: names of the parameters that never train."""
    model = config.model
    mixture = is_mixture(model, layer)

    def unread(width: float, *matrices: str) -> float:
        names = {f"layers.{layer}.{matrix}.weight" for matrix in matrices}
        return width if names <= frozen else 0.0

    experts = model.experts_per_token + model.n_shared_experts
    return Block(
        stream=model.dim / tp,
        normed=model.dim,
        query=model.n_heads * head_dim(model) / tp,
        kv=n_kv_heads(model) * head_dim(model) / tp,
        ffn=(experts * expert_dim(model) if mixture else model.ffn_dim) / tp,
        statistics=model.n_heads / tp * 4 / BYTES[config.training.compute_dtype],
        routed=model.experts_per_token * model.dim if mixture else 0,
        unread=unread(model.dim, *(f"self_attn.{name}_proj" for name in "qkv"))
        + unread(model.dim, "mlp.gate_proj", "mlp.up_proj")
        + unread(model.ffn_dim / tp, "mlp.down_proj"),
    )


def checkpointed_layers(config: ActivationCheckpoint, n_layers: int) -> Sequence[int]:
    """The layers to which the mode applies."""
    if config.mode == "none":
        return ()
    if config.mode == "budget":
        return range(n_layers)
    layers = layer_numbers(config.layers, n_layers) if config.layers else range(n_layers)
    return layers[config.every_nth_layer - 1 :: config.every_nth_layer]
