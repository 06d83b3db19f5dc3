"""`training.reduction = "exact"`: every data-parallel mesh has the same bits, of losses, norms and weights.

In float32 or bfloat16, where any other order of a sum shows; with AdamW's small default eps, which amplifies it.
"""

from scripts.parity import dtype_overrides
from scripts.parity_compare import bits
from scripts.parity_rows import words

CONFIG = "parity.toml"
RUN: dict[str, object] = {"training.steps": 20, "training.reduction": "exact", "lr_schedule.total_steps": 20}
SMALL: dict[str, object] = {**RUN, "model.dim": 32, "model.n_layers": 2, "model.ffn_dim": 72, "model.vocab_size": 200}


def sha(ranks, n_ranks: int, overrides: dict[str, object], dtype: str = "float32") -> str:
    """The digest of a run, which must be the same on all of its ranks."""
    found = set(ranks(n_ranks, bits, CONFIG, dtype_overrides(dtype) + words(SMALL | overrides)))
    assert len(found) == 1
    return found.pop()


def test_ddp_and_fsdp_have_the_bits_of_one_rank(ranks):
    one = sha(ranks, 1, {})
    assert sha(ranks, 2, {"mesh.dp_replicate": 2}) == one
    assert sha(ranks, 2, {"mesh.dp_shard": 2}) == one
