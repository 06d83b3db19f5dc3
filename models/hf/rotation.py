"""Rotary frequencies that depend on the length of the sequences (`rope_type` "dynamic").

Left to themselves, transformers' modules keep the frequencies of the longest sequence so far, so that what a text gives
would depend on those before it; and they ask for values of tensors, which a model without memory does not have.
"""

from typing import Any

import torch

_KIND = "dynamic"


class DynamicRotations:
    """The modules of a family that compute such frequencies, which they get from here, for each forward pass."""

    def __init__(self, family: Any) -> None:
        """Take their own updates away from them: they then use what they have."""
        self._found: list[tuple[Any, str | None]] = []
        """Modules, each with the kind of layers whose frequencies these are; None: it has those of all layers."""
        for module in family.modules():
            kinds = getattr(module, "rope_type", None)
            if kinds == _KIND:
                self._found.append((module, None))
                module.rope_type = "default"
            elif isinstance(kinds, dict):
                self._found += [(module, layers) for layers, kind in kinds.items() if kind == _KIND]
                module.rope_type = {layers: "default" if kind == _KIND else kind for layers, kind in kinds.items()}

    def __bool__(self) -> bool:
        return bool(self._found)

    def set_length(self, seq_len: int) -> None:
        """Give the modules the frequencies that a new model of transformers has for sequences of this length."""
        for module, layers in self._found:
            prefix = "" if layers is None else f"{layers}_"
            frequencies = getattr(module, f"{prefix}original_inv_freq")
            if seq_len > module.original_max_seq_len:
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                length = torch.full((), seq_len, device=frequencies.device)  # a copy from the host would wait
                compute = ROPE_INIT_FUNCTIONS[_KIND]
                frequencies, _ = compute(module.config, frequencies.device, seq_len=length, layer_type=layers)
            setattr(module, f"{prefix}inv_freq", frequencies.clone())
