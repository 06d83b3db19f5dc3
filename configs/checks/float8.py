"""Rules for float8 matmuls; what the GPU, torchao and the model's matrices decide is checked when the run starts."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.float8 import MULTIPLE
from configs.schema import Config


def _device(config: Config, _: int | None) -> Iterator[Problem]:
    float8 = config.float8
    training = config.training
    if float8.recipe == "none" or float8.emulate:
        return
    if config.job.device == "cpu":
        yield (
            "float8.recipe",
            'a CPU has no float8 matmuls (job.device is "cpu"); set float8.emulate = true, or leave recipe out',
        )
    if training.compute_dtype == "float64":
        yield (
            "float8.recipe",
            "float8 matmuls have no float64 sums; set float8.emulate = true, or another compute_dtype",
        )
    tokens = training.micro_batch_size * training.seq_len
    if float8.recipe != "rowwise_with_gw_hp" and tokens % config.mesh.cp == 0 and tokens // config.mesh.cp % MULTIPLE:
        yield (
            "training.micro_batch_size",
            f"the gradients of weights are float8 matmuls over the micro-batch's {training.micro_batch_size} x "
            f"{training.seq_len} / cp {config.mesh.cp} = {tokens // config.mesh.cp} tokens, which must be a multiple "
            f"of {MULTIPLE}",
        )


def _gather(config: Config, _: int | None) -> Iterator[Problem]:
    if not config.float8.fsdp_all_gather:
        return
    if config.fsdp.partition == "owner":
        yield "float8.fsdp_all_gather", 'partition "owner" gathers nothing; leave fsdp_all_gather out'
    if config.fsdp.cpu_offload:
        yield (
            "float8.fsdp_all_gather",
            "with fsdp.cpu_offload shards are sent to the GPU before they are rounded; leave one of them out",
        )


RULES: tuple[Rule, ...] = (_device, _gather)
