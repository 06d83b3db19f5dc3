"""Opens a job: checks all that it names, and finds its data and its checkpoint, before minutes go into weights."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.storage import FolderStorage
from configs.errors import KeelError, mistakes_of_the_job
from configs.layout import mesh_sizes
from configs.load import LoadedConfig
from configs.run_stages import TABLES, RunStage, largest_first, stage_of_position
from configs.schema import Config
from parallelisms.attention.backend import attention_kernel
from parallelisms.attention.delta import delta_kernel
from parallelisms.mesh import Mesh, build_mesh
from parallelisms.ranks import on_rank_zero
from parallelisms.symmetric_memory import fast_paths
from trainer.data.loader import DataLoader, build_loader
from trainer.data.order import Start
from trainer.guards.agreement import compare_data
from trainer.guards.environment import device_name
from trainer.guards.saved_state import check_saved_state
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.planning.by_memory import choice_by_memory, with_choice
from trainer.planning.float8 import float8_products
from trainer.planning.flops import peak_flops
from trainer.planning.skeleton import skeleton
from trainer.planning.stage_table import stage_table
from trainer.planning.unknown_names import require_known_names
from trainer.preparation import import_weights, prepare_data, require_inputs, require_teacher, with_imported_weights
from trainer.progress import Progress
from trainer.report.console import Console
from trainer.report.metrics import Kind, TimeLedger
from trainer.saved_state import RunState
from trainer.saving import open_checkpoints
from trainer.validation import Validation


@dataclass(frozen=True)
class Runtime:
    """A job on one rank, and what one launch of it runs with there."""

    job: LoadedConfig
    device: torch.device
    console: Console
    stop: StopRequest
    """Set by signals."""
    ledger: TimeLedger
    """How the time since the launch was spent."""
    watchdog: Watchdog
    storage: FolderStorage | None = None
    """Where checkpoints are; None: in the run folder, which all ranks see."""


class Opened:
    """A job that is checked and open on this rank's place in the mesh; no weight is drawn yet."""

    def __init__(self, runtime: Runtime) -> None:
        """Open it; all ranks must do so. The process group and the run folder must exist.

        Raises:
            KeelError: the job, its data or its checkpoint is at fault; raised on all ranks.
        """
        job = runtime.job
        device = runtime.device
        console = runtime.console
        watchdog = runtime.watchdog
        config = job.config
        self.device = device
        self.choice = job.choice
        self.storage = runtime.storage
        """Where checkpoints are; None: in the run folder."""
        self.warnings = job.warnings
        self.plan = stage_table(job)
        """The stages of the run, a line each; empty if there are none."""
        self.peak = peak_flops(device_name(device), config.training)
        """The device's peak FLOP/s; None if it is unknown."""
        self.mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), device)
        with mistakes_of_the_job():
            require_teacher(job)
            for each in job.jobs:
                require_known_names(each)
            self.delta = delta_kernel(config, device, console.line)
            """What computes layers of kind delta; known before the memory is estimated. Empty if there are none."""
            most, *others = [stage.config for stage in largest_first(job.stages, config.training.steps)]
            self.by_memory = choice_by_memory(most, self.mesh, others)
            """The recomputation that fits the memory, and what else is chosen with it; None: as the job says."""
            job = with_choice(job, self.by_memory)
            self.config = config = job.config
            # What the job leaves open, each as a launch prints it:
            self.attention = attention_kernel(config, device)
            self.float8 = float8_products(config, device)
            self.communication = fast_paths(config, self.mesh)
            on_rank_zero(None, lambda: require_inputs(job))
            with runtime.ledger.measure(Kind.PREPARATION):
                watchdog.on_first_rank("preparing data", lambda: prepare_data(config, console, runtime.stop))
                watchdog.on_first_rank("importing weights", lambda: import_weights(config, console))
                for stage in job.stages:
                    compare_data(stage.config)
            self.config = config = with_imported_weights(config)
            self.checkpoints = open_checkpoints(config, self.mesh, console, watchdog.incarnation, runtime.storage)
            saved = skeleton(config.model).saved
            self.found = self.checkpoints.find({f"model.{name}": shape for name, shape in saved.items()})
            """The checkpoint's record of the run; None if the run starts from scratch."""
            self.stages = [_as_opened(stage, config) for stage in job.stages]
            """All stages of the run."""
            self.largest = largest_first(self.stages, config.training.steps)[0].config
            """The job of the stage that takes the most memory."""
            self.begin_at(self.found)
            read: dict[str, int] = {}
            for number, stage in enumerate(self.stages, 1):
                if stage.first_step > self.stage.first_step:
                    on_rank_zero(None, partial(_try_data, number, stage, Start(read=dict(read))))
                read |= {source.name: 0 for source in stage.config.data.sources}

    def begin_at(self, saved: dict[str, Any] | None) -> None:
        """Set the run's progress, and open its data, at what a checkpoint says; None: at the start."""
        if saved:
            check_saved_state(saved)
        self.progress = Progress(self.config, RunState(**saved["run"]) if saved else RunState())
        position: dict[str, Any] = saved["data"] if saved else {"next_sample": 0, "sources": None}
        begins = position.get("start", {}).get("sample", 0) == position["next_sample"]
        self.stage = stage_of_position(self.stages, self.progress.run.step, begins)
        """The stage that the position in the data is of."""
        self.progress.config = self.stage.config
        self.loader = open_loader(self.stage.config, self.mesh, position)
        self.validation = Validation(self.stage.config, self.mesh)


def _try_data(number: int, stage: RunStage, start: Start) -> None:
    """Open and close the data of a later stage, so that what is too short shows now and not at its border.

    Args:
        number, stage: the stage, and its number, from 1.
        start: names the sources of earlier stages.

    Raises:
        KeelError: the data is at fault; the message says in which stage.
    """
    config = stage.config
    try:
        build_loader(config, 0, 1, start_sample=0, start=start).close()
        if config.validation.interval:
            build_loader(config, 0, 1, start_sample=0, validation=True).close()
    except KeelError as error:
        # Its lengths are not those of the job's own tables, which the message would seem to mean.
        raise type(error)(f"stage {number}, from step {stage.first_step:,} on: {error}") from None


def _as_opened(stage: RunStage, config: Config) -> RunStage:
    """A stage with the tables of the whole run as this launch has them."""
    tables = {name: getattr(config, name) for name in Config.model_fields if name not in TABLES}
    return replace(stage, config=stage.config.model_copy(update=tables))


def open_loader(config: Config, mesh: Mesh, position: dict[str, Any]) -> DataLoader:
    """This rank's loader of the training data from a position on, as `DataLoader.state_dict` returned it."""
    return build_loader(
        config,
        mesh.dp_rank,
        mesh.sizes.dp,
        position["next_sample"],
        states=position["sources"],
        order=position.get("order"),
        start=Start(**position.get("start", {})),
    )
