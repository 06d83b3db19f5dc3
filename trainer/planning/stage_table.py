"""The plan of a run with stages as a table: where each begins, what a step has, its learning rates, and its data."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from configs.errors import UserError
from configs.layout import tokens_per_step
from configs.load import LoadedConfig
from configs.places import is_url
from configs.run_stages import RunStage, steps_of_stages
from configs.schema import Config, Source
from trainer.lr_schedule import learning_rate_of
from trainer.report.units import aligned, count

_HEAD = ("stage", "first step", "after tokens", "tokens", "sequences", "learning rate", "epochs of its sources")


def stage_table(job: LoadedConfig) -> list[str]:
    """The lines of the table; none for a job without stages."""
    if not job.later_stages:
        return []
    sizes: dict[str, int | None] = {}
    total: Counter[str] = Counter()
    lengths = steps_of_stages(job.stages, job.config.training.steps)
    rows: list[tuple[str, ...]] = [_HEAD]
    for number, (stage, steps) in enumerate(zip(job.stages, lengths, strict=True), 1):
        rows.append((str(number), *_row(stage, steps, sizes, total)))
    return aligned(rows)


def _row(stage: RunStage, steps: int, sizes: dict[str, int | None], total: Counter[str]) -> tuple[str, ...]:
    """The cells of a stage of so many steps; `total` counts the tokens of each source so far."""
    config = stage.config
    shape = f"{config.training.global_batch_size:,} x {config.training.seq_len:,}"
    begins = f"{stage.first_step:,}", f"{stage.border.tokens:,}"
    if not steps:
        return (*begins, "none: training.steps is before", shape, "", "")
    tokens = steps * tokens_per_step(config)
    rates = [learning_rate_of(stage, number) for number in (stage.first_step, stage.border.after + steps)]
    return (
        *begins,
        count(tokens),
        shape,
        " to ".join(f"{rate:.3g}" for rate in rates),
        ", ".join(_epochs(config, tokens, sizes, total)),
    )


def _epochs(config: Config, tokens: int, sizes: dict[str, int | None], total: Counter[str]) -> Iterator[str]:
    """A word for each source: its epochs in the stage and, if more, in the run up to its end; tokens if unknown."""
    weights = sum(source.weight for source in config.data.sources)
    for source in config.data.sources:
        of_stage = round(tokens * source.weight / weights)
        total[source.name] += of_stage
        key = source.path or source.name
        if key not in sizes:
            sizes[key] = _size(source, config)
        size = sizes[key]
        if size is None:
            yield f"{source.name} {count(of_stage)} tokens"
            continue
        so_far = f" ({total[source.name] / size:.3f} so far)" if total[source.name] > of_stage else ""
        yield f"{source.name} {of_stage / size:.3f}{so_far}"


def _size(source: Source, config: Config) -> int | None:
    """Tokens of a source of token files; None if it is another, not there yet, or in object storage."""
    if source.kind != "tokens" or source.path is None or is_url(source.path):  # --validate makes no request
        return None
    from trainer.data.token_file import TokenFolder  # needs numpy

    with suppress(UserError):
        return TokenFolder(source.path, config.model.vocab_size, check_content=False).n_tokens
    return None
