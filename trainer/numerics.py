"""How a GPU's libraries compute: float32 products with full or reduced precision, sums in a fixed order or not.

Many CUDA kernels add numbers in the order in which threads happen to arrive, among them the backward pass of cuDNN's
attention, torch's default. The compiler times variants of a kernel and takes the fastest, each with its own order of
sums. So two runs of one job differ in their last bits, unless `training.deterministic` forbids all of that.
"""

import os

import torch
import torch._inductor.config as inductor_config

from configs.errors import UserError
from configs.schema import Training
from parallelisms.sums import sums_of

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # from NVIDIA's cuBLAS documentation, "Results reproducibility"


def set_numerics(training: Training, device_type: str) -> None:
    """Configure this process to compute as the job asks; call it before CUDA is used.

    A CPU's results always have the same bits, and the full precision of float32, whatever the settings.

    Raises:
        UserError: the environment contradicts the settings.
    """
    if device_type != "cuda":
        return
    if not (sums_of(training).mesh_changes_bits or training.deterministic):
        raise UserError(
            'training.reduction = "exact" fixes the order of sums over ranks and micro-batches, but the kernels of a '
            "GPU may add in any order; also set training.deterministic = true"
        )
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.use_deterministic_algorithms(training.deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not training.deterministic)
    inductor_config.deterministic = training.deterministic
    if training.deterministic:
        # Filling new memory with NaN would take time, and makes nothing more exact.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        workspace = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC_WORKSPACES[0])
        if workspace not in _DETERMINISTIC_WORKSPACES:
            raise UserError(
                f"training.deterministic needs {_WORKSPACE} to be {' or '.join(_DETERMINISTIC_WORKSPACES)} in the "
                f'environment, and it is "{workspace}"; unset it'
            )
