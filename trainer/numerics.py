"""How a GPU's libraries compute: products of float32 with all their bits or fewer, and sums in a fixed order or not.

Many of CUDA's kernels add numbers up in the order in which threads happen to arrive, among them the backward pass of
cuDNN's attention, torch's default; and the compiler times variants of a kernel and takes the fastest, whose order of
sums is its own. So two runs of one job differ in their last bits, unless `training.deterministic` forbids all of that.
"""

import os

import torch
import torch._inductor.config as inductor_config

from configs.errors import UserError
from configs.schema import Training

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # of NVIDIA's documentation of cuBLAS, "Results reproducibility"


def set_numerics(training: Training, device_type: str) -> None:
    """Let everything that runs from now on in this process compute as the job asks; before CUDA is used.

    A CPU's results have the same bits every time, and all the bits of float32, whatever is asked.

    Raises:
        UserError: the environment forbids what is asked.
    """
    if device_type != "cuda":
        return
    torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    torch.use_deterministic_algorithms(training.deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not training.deterministic)
    inductor_config.deterministic = training.deterministic
    if training.deterministic:
        # It would set new memory to NaN, which takes time, and makes nothing more exact.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        workspace = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC_WORKSPACES[0])
        if workspace not in _DETERMINISTIC_WORKSPACES:
            raise UserError(
                f"training.deterministic needs {_WORKSPACE} to be {' or '.join(_DETERMINISTIC_WORKSPACES)} in the "
                f'environment, and it is "{workspace}"; unset it'
            )


def promise(training: Training, device_type: str) -> str:
    """What a resumed run has in common with an undisturbed one on this kind of device."""
    if device_type == "cpu":
        return "bit for bit that of a run without a stop"
    if training.deterministic:
        return "bit for bit that of a run without a stop (training.deterministic)"
    return "that of a run without a stop up to rounding; bit for bit with training.deterministic = true, slower"


def float32_products(training: Training, device_type: str) -> str:
    """How products of float32 are computed on a GPU; empty where there are none, or there is no choice."""
    if device_type == "cpu" or training.compute_dtype != "float32":
        return ""
    return "products in TF32 (10 bits of each factor)" if training.tf32 else "products without TF32: exact, and slow"
