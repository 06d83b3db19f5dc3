"""Computes steps of a run again, from a checkpoint, in a run folder of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoint.bucket_storage import with_tensors
from checkpoint.find import kept_tokenizer, tokenizer_of
from checkpoint.manifest import step_folder, steps_in
from checkpoint.reproducibility import changed_settings, changes
from configs.errors import UserError
from configs.load import LoadedConfig, load
from configs.reading.overrides import words
from configs.run_change import run_key_diff
from configs.run_stages import RunStage, stage_of
from configs.schema import Config
from configs.table import with_keys
from parallelisms.sums import sums_of
from scripts.proof.compare import MAX_STEPS_APART, Difference, Gap, bound_of, difference, gaps
from scripts.proof.recorded import read_stretch
from trainer.opening import Opened, Runtime, open_loader
from trainer.optimizers.rule import rule_of
from trainer.proof.record import FILE_NAME, TEACHER, Launch, Step
from trainer.teacher import teacher_seal
from trainer.trainer import Trainer

JOB_NAME = "job.toml"


@dataclass(frozen=True)
class Plan:
    """Which steps of a run are computed again, and from what."""

    run: Path
    checkpoint: Path | None
    """None: from the initial weights."""
    first_sample: int | None
    """The first sample of the steps, if the run went back to the checkpoint, but not in its data; None: the next."""
    launch: Launch
    """The launch that computed the last step."""
    steps: dict[int, Step]
    """Their fingerprints."""
    earlier: tuple[Launch, ...] = ()
    """The launches that computed the steps before, perhaps on other meshes."""

    @property
    def first(self) -> int:
        """The first step that is computed again."""
        return min(self.steps)

    @property
    def last(self) -> int:
        """The step that was asked for."""
        return max(self.steps)

    def words(self, folder: Path) -> list[str]:
        """The keys of the replay's command line that are not the run's, for a replay in `folder`."""
        load_from = "none" if self.checkpoint is None else str(self.checkpoint.resolve())
        values = {
            "job.output_dir": str(folder),
            "checkpoint.load": load_from,
            "checkpoint.mode": "sync",
            "checkpoint.interval": 0,
            "checkpoint.after_save": "[]",
            "training.steps": self.last,
            "validation.interval": 0,
            "metrics.tensorboard": "false",
            "metrics.fingerprint": "true",
            "profile.start_step": 0,
        }
        if self.checkpoint is not None:
            values["checkpoint.init_from"] = "none"
        tokenizer = tokenizer_of(self.checkpoint) if self.checkpoint else kept_tokenizer(self.run)
        if tokenizer:
            values["tokenizer.path"] = str(tokenizer.resolve())
        return [*words(values)]


def plan(run: Path, step: int, folder: Path, begin: int | None = None) -> Plan:
    """Find the newest checkpoint before a step, and what the run recorded of the steps from there on.

    Args:
        run: run folder, in which nothing is changed.
        step: number of the last step to replay.
        folder: a new folder, which gets the job file.
        begin: step of the checkpoint to take instead; 0: the initial weights.

    Raises:
        UserError: the step was not recorded, or there is nothing to begin from.
    """
    steps = [each for each in steps_in(run / "checkpoints") if each < step]
    if begin and begin not in steps:
        raise UserError(f"{run} has no checkpoint of step {begin} before step {step}; it has {steps or 'none'}")
    begin = max(steps, default=0) if begin is None else begin
    checkpoint = with_tensors(step_folder(run / "checkpoints", begin)) if begin else None
    stretch = read_stretch(run, begin + 1, step)
    if step not in stretch.steps:
        raise UserError(f"{run / FILE_NAME} has no fingerprint of step {step}")
    if not begin and 1 not in stretch.steps:  # of a fork, these weights are not what it began with
        raise UserError(
            f"{run} has no checkpoint before step {step}, and its fingerprints begin at step {min(stretch.steps)}, so "
            "what that began with is not known; keep a checkpoint before such a step to replay it"
        )
    launches = [stretch.launches[number] for number in sorted(stretch.steps)]
    where = f"between step {begin} and step {step}, {run}"
    _check_same_run(launches, folder, where)
    _check_same_samples(launches, load(str(folder / JOB_NAME), is_stored=True).stages, where)
    moved_to = launches[0].next_sample if launches[0].step == begin else None
    earlier = {launch.step: launch for launch in launches if launch is not launches[-1]}
    return Plan(run, checkpoint, moved_to, launches[-1], stretch.steps, tuple(earlier.values()))


def _check_same_run(launches: Sequence[Launch], folder: Path, where: str) -> None:
    """Raise UserError if the launches have different run keys; leaves the job file of the last in `folder`."""
    before: dict[str, Any] | None = None
    for job in dict.fromkeys(launch.job for launch in launches):
        (folder / JOB_NAME).write_text(job)
        config = load(str(folder / JOB_NAME), is_stored=True).config.model_dump(mode="json")
        if before and (changed := run_key_diff(before, config)):
            raise UserError(
                f"{where} was resumed with other run keys ({'; '.join(changed)}): keep a checkpoint in between to "
                "replay such a step"
            )
        before = config


def _check_same_samples(launches: Sequence[Launch], stages: Sequence[RunStage], where: str) -> None:
    """Raise UserError if a launch but the first passed over samples: a replay would compute with these."""
    for before, launch in pairwise(launches):
        steps = range(before.step + 1, launch.step + 1)
        read = sum(stage_of(stages, step).config.training.global_batch_size for step in steps)
        if launch.next_sample != before.next_sample + read:
            raise UserError(
                f"{where} went back to step {launch.step} after a spike of the loss, but not in its data; choose a "
                f"step up to {launch.step}, or begin there (for keel reproduce, with --begin {launch.step})"
            )


# --------------------------------------------------------------------------- computing


def require_same_teacher(launch: Launch, config: Config) -> None:
    """Check that a replay by `config` learns from the teacher that the run learned from.

    Raises:
        UserError: it is another checkpoint, or can't be found.
    """
    found = teacher_seal(config)
    if found != launch.data.get(TEACHER, found):
        raise UserError(
            f'distillation.teacher is "{config.distillation.teacher}", which is another checkpoint than the one that '
            "the run learned from; name that one with --distillation.teacher FOLDER"
        )


def reporting_to_nobody(job: LoadedConfig) -> LoadedConfig:
    """The job of a replay: no logger hears of it, and no code is run that the run names."""
    return replace(job, config=with_keys(job.config, metrics={"wandb": False, "sink": None}))


class Replayer(Trainer):
    """Trains the steps of a replay, and leaves no checkpoint."""

    def __init__(self, first_sample: int | None, runtime: Runtime, before_build: Callable[[Opened], None]) -> None:
        """Set up the trainer like `Trainer`; `first_sample` is the plan's.

        Raises:
            UserError: the data can't begin there.
        """
        super().__init__(runtime, before_build)
        self._enter_stage(self.step + 1)  # the samples that were passed over at its border are its own
        position = self.loader.state_dict()
        if first_sample is None or position["next_sample"] == first_sample:
            return
        if any(source.kind == "text" for source in self.config.data.sources):
            raise UserError(
                "the run went back to this checkpoint after a spike of the loss, but not in its data, and text that "
                "is tokenized while training can't be read from another sample on; choose a step up to the checkpoint"
            )
        self.loader.close()
        self.loader = open_loader(self.config, self.learner.mesh, position | {"next_sample": first_sample})

    def _save(self) -> None:
        pass


# --------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Verdict:
    """A replay's result."""

    last: int
    """The step that was asked for."""
    last_compared: int
    """The last step that was compared."""
    changed: dict[str, str]
    """What may have changed the bits: mesh, settings and environment, "old -> new" by name."""
    expects_bits: bool
    """Whether any difference in bits is a fault: nothing has changed, or sums are exact and the first step is equal.

    Sums in another order may be equal in one step, by luck, and not in the next one.
    """
    difference: Difference | None
    """The difference in the first step that is not equal in bits; None if all are."""
    largest: Gap | None
    """The largest gap relative to its bound, if bits may differ."""
    first_outside: Gap | None
    """The first gap beyond its bound."""

    @property
    def holds(self) -> bool:
        """Whether the replay agrees with the run."""
        if self.difference is None:
            return True
        return not self.expects_bits and self.first_outside is None and self.last_compared == self.last


def judge(plan: Plan, folder: Path) -> Verdict:
    """Compare the replay that was computed in `folder` with the run.

    Raises:
        UserError: the replay did not come to its end.
    """
    replayed = read_stretch(folder, plan.first, plan.last)
    if absent := sorted(plan.steps.keys() - replayed.steps.keys()):
        raise UserError(f"the replay has no fingerprint of step {absent[0]}")
    now = replayed.launches[plan.last]
    changes_since = [_changed(was, now, folder) for was in (*plan.earlier, plan.launch)]
    changed = {name: line for each in changes_since for name, line in each.items()}
    pairs = [(plan.steps[number], replayed.steps[number]) for number in sorted(plan.steps)]
    names = [name for name, _ in plan.launch.parameters]
    found = next(filter(None, (difference(*pair, names, plan.launch.ranks) for pair in pairs)), None)
    is_one_change = all(each == changes_since[0] for each in changes_since)
    config = load(str(folder / "config.toml"), is_stored=True).config
    is_exact = is_one_change and not sums_of(config.training).mesh_changes_bits
    expects_bits = not changed or (is_exact and not difference(*pairs[0], names, plan.launch.ranks))
    if found is None or expects_bits:
        return Verdict(plan.last, plan.last, changed, expects_bits, found, None, None)
    largest = None
    outside = None
    pairs = pairs[:MAX_STEPS_APART]
    dtype = config.training.compute_dtype
    orthogonalizes = rule_of(config.optimizer.name).hidden_matrices_only
    for recorded, again in pairs:
        bound = bound_of(recorded.step - plan.first + 1, dtype, orthogonalizes)
        for gap in gaps(recorded, again, plan.launch.parameters, bound, dtype):
            if largest is None or gap.value / gap.bound > largest.value / largest.bound:
                largest = gap
            if outside is None and gap.value > gap.bound:
                outside = gap
    return Verdict(plan.last, pairs[-1][0].step, changed, expects_bits, found, largest, outside)


def _changed(was: Launch, now: Launch, folder: Path) -> dict[str, str]:
    """What may have changed the bits between two launches, "old -> new" by name."""
    before, after = configs_of(was, now, folder)
    return changed_settings(before, was.mesh, after, now.mesh) | changes(was.environment, now.environment)


def configs_of(was: Launch, now: Launch, folder: Path) -> list[dict[str, Any]]:
    """The configs of two launches as JSON; their jobs are left in `folder`."""
    configs = []
    for number, launch in enumerate((was, now)):
        file = folder / f"launch-{number}.toml"
        file.write_text(launch.job)
        configs.append(load(str(file), is_stored=True).config.model_dump(mode="json"))
    return configs
