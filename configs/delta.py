"""How layers of kind delta are computed, for checks of a job, its plan and its launch."""

from collections.abc import Iterator

from configs.schema import Config


def passes_states(config: Config) -> bool:
    """Whether ranks compute parts of sequences and pass states on, and not whole ones for some of the heads."""
    return config.mesh.cp > 1 and config.context.method != "all_to_all"


def reasons_against_kernels(config: Config, is_on_gpu: bool) -> Iterator[str]:
    """Why flash-linear-attention's kernels can't compute a job's layers, each a clause after their name."""
    training = config.training
    if not is_on_gpu:
        yield "runs on GPUs only, and this job is for a CPU"
    if training.compute_dtype != "bfloat16":
        yield f'rounds to bfloat16, and training.compute_dtype is "{training.compute_dtype}"'
    if training.deterministic:
        yield "chooses kernels by their times in each process, but training.deterministic fixes the order of sums"
