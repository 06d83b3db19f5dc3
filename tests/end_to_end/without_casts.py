"""train.py, in which the norms of Qwen3 and Gemma 3 compute in the type that they are given, float64 included.

transformers' own cast to float32, so that another order of sums before them can change a value's last bit there. Runs
without the casts show that nothing else differs between meshes.
"""

from typing import Any

import keel  # noqa: F401 - Keel's packages come first
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from train import end_process, main


def _qwen3(self: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


def _gemma3(self: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], 1.0 + self.weight, self.eps)


if __name__ == "__main__":
    Qwen3RMSNorm.forward = _qwen3
    Gemma3RMSNorm.forward = _gemma3
    end_process(main())
