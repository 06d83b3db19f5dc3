"""The by-products of a run's checkpoints while it trains: exports in Hugging Face's format, and evaluations."""

from collections.abc import Callable

import torch.distributed as dist

from configs.schema import Config
from trainer.evaluation.beside import Evaluations
from trainer.exports import Exports
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.report.console import Console
from trainer.report.metrics import EvaluationMetrics


class ByProducts:
    """The exports and evaluations of one run; every rank has them, and the first rank does the work."""

    def __init__(
        self,
        config: Config,
        console: Console,
        stop: StopRequest,
        watchdog: Watchdog,
        committed: Callable[[], int | None],
        record: Callable[[EvaluationMetrics], None],
    ) -> None:
        """
        Args:
            committed: returns the step of the newest checkpoint.
            record: called on the first rank with each new result of an evaluation.
        """
        self._config = config
        self._console = console
        self._stop = stop
        self._watchdog = watchdog
        self._committed = committed
        self._record = record

    def open(self) -> None:
        """Begin after the newest checkpoint, or begin again after a rewind to it; all ranks call it.

        Raises:
            UserError: the tokenizer can't be exported, or a folder can't be written.
        """
        config = self._config
        step = self._committed()
        log = self._console.line
        warn = self._console.warning
        self._exports = Exports(config, config.job.folder, step, log, warn) if config.checkpoint.export_every else None
        self._evaluations = Evaluations(config, step, self._record, log, warn)

    def poll(self) -> None:
        """Begin what is due and report what is finished; never waits. Call it before a save removes old checkpoints."""
        if dist.get_rank() == 0:
            if self._exports:
                self._exports.poll(self._committed())
            self._evaluations.poll(self._committed())

    def finish(self, is_done: bool) -> None:
        """Finish what is due, including the last checkpoint's; after a signal, the next launch does.

        Args:
            is_done: whether the run has come to its last step.
        """
        if is_done:
            self.poll()
        exports = self._exports
        evaluations = self._evaluations
        if exports:
            self._watchdog.on_first_rank("exports", lambda: exports.finish(lambda: not is_done or bool(self._stop)))
        if self._config.evaluation.interval:
            finish = evaluations.finish
            self._watchdog.on_first_rank("evaluations", lambda: finish(lambda: not is_done or bool(self._stop)))
