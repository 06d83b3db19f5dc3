"""Reads checkpoints: chooses the one that a run begins from, checks all that can be checked, and loads its tensors.

Nothing on disk changes, and no tensor does before every check has passed. All methods are collective: if one rank
fails, all raise the same error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.bucket_storage import place_told, storage_of
from checkpoint.compare import MODEL, shape_differences
from checkpoint.find import find_checkpoint
from checkpoint.index import metadata_of, read_index, read_metadata
from checkpoint.manifest import Damaged, Manifest, RunChange, damaged
from checkpoint.reproducibility import CODE, changed_settings, changed_surroundings
from checkpoint.shards import State, shards_of
from checkpoint.storage import FolderStorage
from checkpoint.tensor_stream import entry_of
from checkpoint.verify import content_damages
from configs.architectures import LOAD
from configs.errors import ConfigError, listed
from configs.places import standing_for
from configs.run_change import function_diff
from configs.run_stages import require_counted, trained_diff
from configs.schema import Checkpoint
from parallelisms.ranks import Json, on_each_rank, on_rank_zero

TrainerState = dict[str, Any]
_OF_TENSORS = (
    "model.",
    "optimizer.name:",
    "optimizer.options",
    "optimizer.groups",
    "optimizer.rounding:",
    "training.dtype:",
)
"""Beginnings of the changes after which a run may hold other tensors."""
OPTIMIZER = "optimizer."
AVERAGE = "average."
UPDATES = "average_updates"
"""The number of the average's updates; of a mean of copies, the step of each."""


def _ignore(text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Log:
    """What tells the user of checkpoints; by default, nothing does."""

    line: Callable[[str], None] = _ignore
    warning: Callable[[str], None] = _ignore
    """Reports a problem that does not stop the work."""


@dataclass(frozen=True)
class Description:
    """A run, as its checkpoints describe it; compared with a run that resumes from one."""

    config: dict[str, Any]
    """The complete config, as JSON-able tables."""
    mesh: dict[str, int]
    """Sizes of the mesh's axes, by name."""
    tokenizer_hash: str | None = None
    """Hash of the tokenizer's file; None without a tokenizer."""
    teacher: str | None = None
    """Seal of the checkpoint of `distillation.teacher`; None without one."""
    environment: dict[str, str] = field(default_factory=dict)
    """All else that decides the bits of the run, besides config, mesh and torch, by name."""
    allow_run_change: bool = False
    """Resume although run keys or the tokenizer have changed; later checkpoints record that they have."""
    rewind_interval: int = 0
    """Steps between the checkpoints that a rewind needs; 0: none."""
    neutral: dict[str, float] = field(default_factory=dict)
    """Tensors that a checkpoint may lack, by name: the values with which the run then begins, which change nothing."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that has passed every check except its tensors'."""

    folder: Path
    manifest: Manifest
    metadata: Metadata
    trainer_state: TrainerState
    changes: list[RunChange] = field(default_factory=list)
    """Run keys that differ now, as `job.allow_run_change` allows."""


@dataclass
class Reader:
    """Reads the checkpoints that one run begins from: `find`, then `load`; `load_step` during training."""

    folder: Path
    """The run's `checkpoints/`."""
    settings: Checkpoint
    run: Description
    """The run of this launch."""
    log: Log
    group: dist.ProcessGroup
    """The group of all ranks."""
    initial: Found | None = None
    """The checkpoint that `checkpoint.init_from` names, if the run takes its weights from it."""
    _candidates: list[Path] | None = None
    """Checkpoints to fall back to if `_found` is damaged; None before `find`."""
    _reason: str = ""
    """Why they were chosen."""
    _problems: list[str] = field(default_factory=list)
    """Damages of the checkpoints before `_found`."""
    _found: Found | None = None

    def find(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Found | None:
        """Choose the checkpoint that the run begins from, and check it as far as possible without the run's state.

        Args:
            shapes: of the model's tensors, by name, if known.

        Returns:
            The checkpoint; None if the run starts from scratch.

        Raises:
            KeelError: as in `load`.
        """
        load = self.settings.load
        go_back = self.settings.go_back

        def choose() -> Json:
            choice = folders.choose(self.folder, load, go_back)
            return [[str(candidate) for candidate in choice.candidates], choice.reason]

        candidates, self._reason = on_rank_zero(self.group, choose)
        self._candidates = [Path(candidate) for candidate in candidates]
        self._find_next()
        found = self._found or self.initial
        if found and shapes:
            self._require_none(found, shape_differences(found.metadata, shapes, self.run.neutral))
        if self.initial and (changes := function_diff(self.initial.manifest.in_effect, self.run.config)):
            self.log.warning(
                f"checkpoint.init_from: the model that was trained in {self.initial.folder} computes something else "
                f"from these weights than this job's:\n  {listed(changes)}"
            )
        return self._found

    def load(self, state: State) -> Found | None:
        """Load the checkpoint that `checkpoint.load` chooses into `state`, in place.

        Returns:
            The checkpoint, another one than `find`'s if that has turned out to be damaged; None if the run starts from
            scratch, and then only the weights of `initial` are loaded into `state`.

        Raises:
            ConfigError: the checkpoint does not exist, or is of another model or tokenizer, or has other run keys.
            Damaged: it is damaged, and all earlier ones are, too.
            UserError: it has another format.
        """
        if self._candidates is None:
            self.find()
        while self._found:
            try:
                self._load(self._found, state)
            except Damaged as error:
                self._pass_over(error)
                self._find_next()
                continue
            newer = ", all newer ones are damaged" if self._problems else ""
            self.log.line(f"resuming from {self._found.folder}: {self._reason}{newer}")
            self._say_other_bits(self._found.manifest)
            return self._found
        self._initialize(state)
        return None

    def load_step(self, step: int, state: State) -> Found:
        """Load the run's checkpoint of `step` into `state`, in place, and return it.

        Run keys that have changed since were allowed, and said, by the launch that changed them.

        Raises:
            KeelError: as in `load`.
        """
        found = self._described(manifests.step_folder(self.folder, step))
        self._load(found, state)
        return found

    def _find_next(self) -> None:
        """Read the first candidate that is not damaged, and check that the run may resume from it.

        If there is none, the run starts from scratch: perhaps with the weights that `checkpoint.init_from` names.
        """
        assert self._candidates is not None
        self._found = None
        while self._found is None and self._candidates:
            candidate = self._candidates.pop(0)
            try:
                self._found = self._find(candidate)
            except Damaged as error:
                self._pass_over(error)
        if self._found is None and self.settings.init_from is not None:
            self.initial = self._find_initial(standing_for(self.settings.init_from))

    def _pass_over(self, error: Damaged) -> None:
        """Warn of a damaged checkpoint if there is one to fall back to; otherwise raise."""
        self._problems.append(str(error))
        if not self._candidates:
            raise Damaged("\n".join(self._problems)) from None
        self.log.warning(f"{error}; trying the one before it")

    def _find(self, folder: Path) -> Found:
        """Read what describes a checkpoint, and check that the run may resume from it."""
        found = self._described(folder)
        for change in found.changes:
            self._allow(change, found)
        return found

    def _described(self, folder: Path) -> Found:
        """Read what describes a checkpoint, with the run keys that differ now."""
        found = _found(on_rank_zero(self.group, lambda: _read(folder)))
        if not found.trainer_state:  # made by scripts/import_hf.py
            raise ConfigError(
                f"checkpoint.load: {folder} holds only a model's weights, no run to resume; to start a run from them, "
                f'set checkpoint.init_from = "{folder}", and checkpoint.load back to "latest"'
            )
        manifest = found.manifest
        _, changes = trained_diff(manifest.config, self.run.config, manifest.step)
        if manifest.tokenizer_hash != self.run.tokenizer_hash:
            changes.append(f"content of the tokenizer: {manifest.tokenizer_hash} -> {self.run.tokenizer_hash}")
        if manifest.teacher != self.run.teacher:
            changes.append(
                f"checkpoint of distillation.teacher: {manifest.teacher} -> {self.run.teacher} (of a run that went on, "
                "name the checkpoint instead)"
            )
        return replace(found, changes=[RunChange(manifest.step, changes)] if changes else [])

    def _load(self, found: Found, state: State) -> None:
        self._fill(self._verified(found), found, state, _may_resume_from)

    def _find_initial(self, folder: Path) -> Found:
        """Read what describes the checkpoint whose weights are to be the initial ones."""
        found = _found(on_rank_zero(self.group, lambda: _read(find_checkpoint(folder))))
        theirs = found.manifest.tokenizer_hash
        if theirs and self.run.tokenizer_hash and theirs != self.run.tokenizer_hash and not self.run.allow_run_change:
            raise ConfigError(
                f"checkpoint.init_from: the weights in {found.folder} were trained with another tokenizer, so their "
                "embedding does not fit this one; set tokenizer.path to it, or --job.allow_run_change true"
            )
        tensors = {name: entry for name, entry in found.metadata.state_dict_metadata.items() if name.startswith(MODEL)}
        return replace(found, metadata=replace(found.metadata, state_dict_metadata=tensors))

    def _initialize(self, state: State) -> None:
        """Start from scratch: from the weights that `checkpoint.init_from` names, or the initial ones."""
        found = self.initial
        if found is None:
            self.log.line(f"starting from random weights ({self._reason})")
            return
        storage = self._verified(found)
        weights = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
        self._fill(storage, found, weights, lambda name, saved: saved.is_floating_point)
        self.log.line(f"starting from the weights of {found.folder} (checkpoint.init_from): {self._reason}")

    def _verified(self, found: Found) -> FolderStorage:
        """Where the checkpoint is, once what describes it is on each host, and every file is as it was written."""
        files = found.manifest.files
        started = time.perf_counter()
        told = on_rank_zero(self.group, lambda: place_told(found.folder))
        opened: list[FolderStorage] = []
        on_each_rank(self.group, lambda: opened.append(storage_of(found.folder, files, told)))
        if problems := content_damages(opened[0], found.folder, files, self.group):
            raise damaged(found.folder, "; ".join(problems))
        self.log.line(f"{found.folder}: verified {len(files)} files ({time.perf_counter() - started:.1f} s)")
        return opened[0]

    def _allow(self, change: RunChange, found: Found) -> None:
        """Report what of the run has changed since the checkpoint.

        Raises:
            ConfigError: `job.allow_run_change` is not set, or does not allow it.
        """
        manifest = found.manifest
        first_step, _ = trained_diff(manifest.config, self.run.config, manifest.step)
        since = f"\n  from step {first_step:,} on:" if first_step > 1 else ""
        lines = since + "".join(f"\n  {each}" for each in change.changes)
        if not self.run.allow_run_change:
            raise ConfigError(
                f"the run's settings differ from those of checkpoint {found.folder}:{lines}\n"
                "Change it back, choose another job.output_dir, or resume with --job.allow_run_change true (not "
                "possible for training.seq_len, training.seed or the mixture, which order the samples)"
            )
        require_counted(manifest.config, self.run.config, manifest.step, manifest.tokens)
        self.log.line(f"run keys have changed since the checkpoint, as job.allow_run_change allows:{lines}")

    def _say_other_bits(self, manifest: Manifest) -> None:
        """Report if the resumed run will not be bit-identical to an uninterrupted one.

        This is a warning if the machine or the software differs, which may be unintended. If only the mesh or machine
        keys differ, the user has set them, and a log line suffices.
        """
        surroundings = changed_surroundings(manifest, self.run.environment)
        changes = surroundings | changed_settings(manifest.config, manifest.mesh, self.run.config, self.run.mesh)
        if changes:
            say = self.log.warning if surroundings else self.log.line
            verb = "may" if changes.keys() == {CODE} else "will"
            lines = "; ".join(f"{name} {change}" for name, change in changes.items())
            say(f"from here on, the bits of this run {verb} differ from those of an uninterrupted one: {lines}")

    def _fill(
        self, storage: FolderStorage, found: Found, state: State, may_convert: Callable[[str, torch.dtype], bool]
    ) -> None:
        """Compare names, shapes and dtypes on all ranks, then load the tensors.

        The average of the weights is left out where only one side has it, or both have another kind, as
        job.allow_run_change allows; the run then begins a new one. Neutral tensors that the checkpoint lacks get their
        values.
        """
        saved = found.metadata.state_dict_metadata
        lacking = {name: value for name, value in self.run.neutral.items() if name in state and name not in saved}
        for name, value in lacking.items():
            state[name].fill_(value)
        state = {name: tensor for name, tensor in state.items() if name not in lacking}
        saved = {name: each for name, each in saved.items() if not name.startswith(LOAD) or name in self.run.neutral}
        found = replace(found, metadata=replace(found.metadata, state_dict_metadata=saved))
        is_alike = UPDATES in saved and UPDATES in state
        if not is_alike or entry_of(found.metadata, UPDATES).size != state[UPDATES].shape:
            if UPDATES in state:
                state[UPDATES].zero_()  # a run that goes back has an average of the steps that it leaves
            state = _without_average(state)
            tensors = _without_average(saved)
            found = replace(found, metadata=replace(found.metadata, state_dict_metadata=tensors))
        shards = shards_of(state)
        self._require_none(found, store.differences(found.metadata, shards, self.group, may_convert))
        started = time.perf_counter()
        store.read(storage, found.folder, found.metadata, shards, self.group)
        self.log.line(f"loaded step {found.manifest.step} in {time.perf_counter() - started:.1f} s")

    def _require_none(self, found: Found, differences: Sequence[str]) -> None:
        """Raise ConfigError if a checkpoint's tensors differ from the run's."""
        if differences:
            changes = [each for change in found.changes for each in change.changes if each.startswith(_OF_TENSORS)]
            keys = [change.partition(":")[0] for change in changes]
            is_other_model = not keys or any(key.startswith(MODEL) for key in keys)
            what = "model" if is_other_model else " and ".join(keys)
            remedy = "Change [model] and [optimizer] back, or choose another checkpoint.load or job.output_dir"
            if self.initial:
                remedy = "Set [model] to that of these weights, or choose another checkpoint.init_from"
            elif changes:
                back = f"Change {'it' if len(changes) == 1 else 'them'} back"
                remedy = f"{back}, or choose another checkpoint.load or job.output_dir:\n  {listed(changes)}"
            raise ConfigError(
                f"checkpoint {found.folder} is of another {what}; {len(differences)} tensors differ:\n"
                f"  {listed(differences)}\n{remedy}"
            )


def _without_average(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in named.items() if not name.startswith((AVERAGE, UPDATES))}


def _read(folder: Path) -> Json:
    """Read the parts of a checkpoint that describe it, in the form in which all ranks get them.

    Raises:
        Damaged: it is damaged.
        UserError: it has another format.
    """
    manifest = manifests.read_manifest(folder)
    read_metadata(folder)
    index = read_index(folder).decode()
    return [str(folder), asdict(manifest), index, manifests.read_trainer_state(folder)]


def _found(told: list[Any]) -> Found:
    """The result of `_read` as an object."""
    folder, manifest, index, trainer_state = told
    metadata = metadata_of(index.encode(), Path(folder))
    return Found(Path(folder), manifests.manifest_of(manifest), metadata, trainer_state)


def _may_resume_from(name: str, saved: torch.dtype) -> bool:
    """Whether a tensor may change its type: moments and averages may, if `moments_dtype` or `dtype` was changed."""
    return name.startswith((OPTIMIZER, AVERAGE)) and saved in (torch.bfloat16, torch.float32, torch.float64)
