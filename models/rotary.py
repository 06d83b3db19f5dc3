"""Rotary position embeddings (Su et al. 2021, RoFormer), also stretched for longer sequences."""

import math

import torch
from torch import Tensor, nn

from configs.architectures.llama_keys import RopeScaling


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding's angles (Su et al. 2021, RoFormer)."""

    inv_freq: Tensor

    def __init__(self, features: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.features = features
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("inv_freq", self._inverse_frequencies(), persistent=False)

    def init_buffers(self) -> None:
        """Fill the buffer after the model left the meta device; float32, whatever the parameters' dtype."""
        self.inv_freq = self._inverse_frequencies("cpu").to(self.inv_freq.device)

    def _inverse_frequencies(self, device: str | None = None) -> Tensor:
        """Radians per token, (features / 2,), float32."""
        exponents = torch.arange(0, self.features, 2, dtype=torch.float32, device=device) / self.features
        frequencies = 1.0 / self.theta**exponents
        return _STRETCHES[self.scaling.kind](frequencies, self.theta, self.scaling) if self.scaling else frequencies

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: (1 or batch, seq) -> cos, sin: (1 or batch, seq, 1, features), float32 for exact large angles."""
        angles = positions[..., None].float() * self.inv_freq  # (batch, seq, features / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        factor = _attention_factor(self.scaling)
        if factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * factor, angles.sin() * factor


def _by_wavelength(frequencies: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's RoPE scaling: long wavelengths are stretched by the factor, short ones kept, those between blended.

    Source: Meta's reference implementation of Llama 3.1 (`apply_scaling`), which is `rope_type = "llama3"` in
    Hugging Face.
    """
    wavelengths = 2 * math.pi / frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = ((scaling.original_seq_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _by_turns(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): stretched, kept or blended by the turns within the original length.

    As in its authors' code and in Hugging Face's `rope_type = "yarn"`, the features between which frequencies are
    blended are whole numbers.
    """
    n = len(frequencies)

    def feature(turns: float) -> float:
        """The feature that turns so often."""
        return n * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(feature(scaling.beta_fast)), 0)
    last = min(math.ceil(feature(scaling.beta_slow)), 2 * n - 1)
    features = torch.arange(n, dtype=torch.float32, device=frequencies.device)
    stretched = ((features - first) / (last - first or 0.001)).clamp(0, 1)
    return stretched * frequencies / scaling.factor + (1 - stretched) * frequencies


def _all_alike(frequencies: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return frequencies / scaling.factor


_STRETCHES = {"llama3": _by_wavelength, "yarn": _by_turns, "linear": _all_alike}


def _attention_factor(scaling: RopeScaling | None) -> float:
    """YaRN's factor on queries and keys (section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x: (batch, seq, heads, head_dim) by its positions; feature i is paired with i + features / 2.

    If the angles are of fewer features than a head has, the others stay as they are.
    """
    features = cos.shape[-1]
    if features < x.shape[-1]:
        return torch.cat((rotate(x[..., :features], cos, sin), x[..., features:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
