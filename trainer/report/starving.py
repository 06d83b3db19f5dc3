"""Experts to which a router sends almost no tokens: they learn nothing, and their parameters are wasted."""

from collections.abc import Mapping, Sequence

STEPS = 20
"""Logged steps whose tokens are counted together, so that no single step starves an expert."""
SHARE = 0.05
"""An expert starves with less than this part of an even share, the mean of its layer's experts."""
_NAMED = 5
"""Experts that a line names."""


class Starving:
    """Counts the tokens of each expert and layer over `STEPS` logged steps, and names each starving expert once."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._steps = 0
        self._named: set[tuple[int, int]] = set()

    def complaint(self, tokens_per_expert: Mapping[int, Sequence[int]] | None) -> str:
        """A sentence on the experts that newly starve, "" if there are none, from a logged step's tokens by layer."""
        for layer, tokens in (tokens_per_expert or {}).items():
            before = self._tokens.get(layer, [0] * len(tokens))
            self._tokens[layer] = [a + b for a, b in zip(before, tokens, strict=True)]
        self._steps += 1
        if self._steps < STEPS:
            return ""
        found = [each for layer, tokens in self._tokens.items() for each in _starving(layer, tokens)]
        new = [each for each in found if each not in self._named]
        self._named.update(new)
        self._tokens = {}
        self._steps = 0
        if not new:
            return ""
        names = [f"expert {expert} of layer {layer}" for layer, expert in new[:_NAMED]]
        names += [f"{len(new) - _NAMED:,} more"] if len(new) > _NAMED else []
        return (
            f"less than {SHARE:.0%} of an even share of the tokens of the last {STEPS} logged steps went to "
            f"{', '.join(names)} (docs/faults.md, a starving expert)"
        )


def _starving(layer: int, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Layer and number of each starving expert of a layer."""
    least = SHARE * sum(tokens) / len(tokens)
    return [(layer, expert) for expert, count in enumerate(tokens) if count < least]
