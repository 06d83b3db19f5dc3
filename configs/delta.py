"""What flash-linear-attention's kernels need of a job, for its checks and for the launch."""

from collections.abc import Iterator

from configs.schema import Config


def reasons_against_kernels(config: Config, is_on_gpu: bool) -> Iterator[str]:
    """Why the kernels can't compute a job's layers of kind delta, each a clause after their name."""
    training = config.training
    if not is_on_gpu:
        yield "runs on GPUs only, and this job is for a CPU"
    if training.compute_dtype != "bfloat16":
        yield f'rounds to bfloat16, and training.compute_dtype is "{training.compute_dtype}"'
    if training.deterministic:
        yield "chooses kernels by their times in each process, but training.deterministic fixes the order of sums"
