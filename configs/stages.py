"""The arithmetic of `mesh.pp` and `[pipeline]`: the layers of each pipeline stage, the stages of each rank.

It needs no torch, like all arithmetic that the checks and the estimates share with the run. Without a pipeline there is
one stage with all layers.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heapreplace
from itertools import accumulate

from configs.architectures.llama_keys import n_further
from configs.errors import ConfigError
from configs.layout import active_matrices, layer_matrices, mixed_elements
from configs.schema import AnyModel, Config, is_described


def stages_per_rank(config: Config) -> int:
    """Number of stages on each pipeline rank."""
    if config.mesh.pp == 1 or config.pipeline.schedule in ("gpipe", "1f1b"):
        return 1
    return config.pipeline.stages_per_rank or 2


def n_stages(config: Config) -> int:
    """Number of stages in the pipeline."""
    return config.mesh.pp * stages_per_rank(config)


def rank_of_stage(config: Config, stage: int) -> int:
    """The pipeline rank of a stage; stages are dealt in rounds, for `zero_bubble_v` back again in the second."""
    turn, place = divmod(stage, config.mesh.pp)
    is_way_back = config.pipeline.schedule == "zero_bubble_v" and turn == 1
    return config.mesh.pp - 1 - place if is_way_back else place


def stages_of_rank(config: Config, rank: int) -> list[int]:
    """The stages of a pipeline rank, ascending."""
    return [stage for stage in range(n_stages(config)) if rank_of_stage(config, stage) == rank]


def layers_of_stages(config: Config) -> list[range]:
    """The layer numbers of each stage.

    Raises:
        ConfigError: there are more stages than layers, or `pipeline.split` does not fit.
    """
    stages = n_stages(config)
    n_layers = config.model.n_layers
    shown = f"pp {config.mesh.pp}" + (f" x {stages_per_rank(config)} stages a rank" if stages > config.mesh.pp else "")
    if stages > n_layers:
        raise ConfigError(f"{shown} = {stages} stages are more than n_layers {n_layers}; each stage needs a layer")
    split = config.pipeline.split if config.mesh.pp > 1 else None
    counts = _even_split(config) if split is None else split
    if len(counts) != stages:
        raise ConfigError(f"split {counts} has {len(counts)} stages, but there are {shown} = {stages}")
    if sum(counts) != n_layers:
        summed = " + ".join(map(str, counts))
        raise ConfigError(f"split {counts} covers {summed} = {sum(counts)} layers, but n_layers is {n_layers}")
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def layers_of_rank(config: Config, rank: int) -> list[int]:
    """The layer numbers of a pipeline rank, ascending."""
    by_stage = layers_of_stages(config)
    return [layer for stage in stages_of_rank(config, rank) for layer in by_stage[stage]]


def _even_split(config: Config) -> Sequence[int]:
    """Split the layers so that the slowest stage is as fast as possible, then so that memory is even.

    All layers are treated as equal (to their mean, where only some have experts or attention), so each goes to the
    stage with the least time so far. Time is proportional to a token's FLOPs: the elements of the matrices that it is
    multiplied with, and half of the attention scores. The embedding takes memory but hardly any time, so its stage
    comes last among equals; earlier stages come later, too, since they keep the activations of more micro-batches.
    """
    model = config.model
    stages = n_stages(config)
    layer, active = _mean_layer(model)
    vocabulary = model.vocab_size * model.dim
    layer_time = active + _mean_mixed(model, config.training.seq_len)
    time = [layer_time] * stages
    memory = [layer] * stages
    memory[0] += vocabulary
    memory[-1] += vocabulary
    time[-1] += vocabulary
    if further := n_further(model):  # each a layer, what it joins, and the head again
        joined = 2 * model.dim**2
        memory[-1] += further * (layer + joined) + vocabulary
        time[-1] += further * (layer_time + joined + vocabulary)
    return _filled(model.n_layers, tuple(time), tuple(memory), layer_time, layer)


@cache  # a search asks for the same split of thousands of jobs
def _filled(
    n_layers: int, time: tuple[int, ...], memory: tuple[int, ...], layer_time: int, layer: int
) -> Sequence[int]:
    """Add layers, one by one, to stages that have one each: to the one with the least time, then the least memory."""
    counts = [1] * len(time)
    least = [(time[stage], memory[stage], -stage) for stage in range(len(time))]
    heapify(least)
    for _ in range(n_layers - len(time)):
        least_time, least_memory, place = least[0]
        counts[-place] += 1
        heapreplace(least, (least_time + layer_time, least_memory + layer, place))
    return tuple(counts)


@cache
def _mean_layer(model: AnyModel) -> tuple[int, int]:
    """Elements of a layer's matrices, and of those that a token is multiplied with, in the mean of all layers."""
    if not is_described(model):
        return 12 * model.dim**2, 12 * model.dim**2  # of a usual layer: only the modules know more
    layers = range(model.n_layers)
    held = sum(layer_matrices(model, layer) for layer in layers) // model.n_layers
    return held, sum(active_matrices(model, layer) for layer in layers) // model.n_layers


@cache  # a search for the fastest mesh asks a hundred thousand times
def _mean_mixed(model: AnyModel, seq_len: int) -> int:
    """Elements that a token is multiplied with to mix it with others, in the mean of all layers."""
    return int(sum(mixed_elements(model, layer, seq_len) for layer in range(model.n_layers))) // model.n_layers


def check_micro_batches(config: Config, micro_batches: int) -> None:
    """Check that the schedule can run this many micro-batches per step.

    Raises:
        ConfigError: it cannot.
    """
    ranks = config.mesh.pp
    batches = f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"
    if config.pipeline.schedule == "1f1b" and micro_batches < ranks:
        raise ConfigError(f'{batches} are too few for schedule "1f1b", which needs one for each of pp {ranks} stages')
    rounds = max(1, micro_batches // ranks)
    if config.pipeline.schedule == "interleaved_1f1b" and micro_batches % rounds:
        raise ConfigError(
            f'{batches} do not fit schedule "interleaved_1f1b", which computes them in {micro_batches} // pp {ranks} = '
            f"{rounds} rounds of equal size, and {rounds} does not divide {micro_batches}"
        )
