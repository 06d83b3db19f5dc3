"""TensorBoard's event files: `metrics.tensorboard`, in `tensorboard/` in the run folder."""

import itertools
import os
import socket
import time
from typing import Any

from configs.files import AppendedFile, is_link, link_refused
from trainer.report.sinks.sink import Record, SinkRun, curves


class TensorBoard:
    """An event file in TensorBoard's format, with records made by TensorBoard's record writer.

    TensorBoard's event writer is not used: it writes in a thread that ends for good at the first error, and reports the
    error only at a later call. Nor is torch's SummaryWriter, which wraps it and costs 0.8 s of imports.
    """

    _numbers = itertools.count()
    """Numbers this process's files, for their names."""

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = event_pb2.Event
        self._summary_type = summary_pb2.Summary
        self._histogram_type = summary_pb2.HistogramProto
        folder = run.folder / "tensorboard"
        if is_link(folder):
            raise link_refused(folder)
        folder.mkdir(exist_ok=True)
        self._outages = run.outages
        self.file = AppendedFile(folder / _event_file_name(next(self._numbers)))
        self._records = RecordWriter(self.file)
        self._add(wall_time=time.time(), file_version="brain.Event:2")
        # Makes TensorBoard drop this step and later ones from earlier files.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=run.first_step, wall_time=time.time(), session_log=start)
        self._outages.flush(self.file)

    def write(self, record: Record) -> None:
        """Append an event with the record's curves, and its experts' loads as histograms."""
        values = [self._summary_type.Value(tag=tag, simple_value=value) for tag, value in curves(record).items()]
        for layer, tokens in record.get("tokens_per_expert", {}).items():
            histogram = self._bars(tokens)
            values.append(self._summary_type.Value(tag=f"router/tokens_per_expert/{layer}", histo=histogram))
        self._add(step=record["step"], wall_time=record["time"], summary=self._summary_type(value=values))
        self._outages.flush(self.file)

    def close(self) -> None:
        """Write the events still pending, or report that they are missing."""
        self._outages.give_up(self.file)

    def _bars(self, heights: list[int]) -> Any:
        """A histogram with a bar of width 1 for each number."""
        return self._histogram_type(
            min=0,
            max=len(heights),
            num=sum(heights),
            sum=sum(i * height for i, height in enumerate(heights)),
            sum_squares=sum(i * i * height for i, height in enumerate(heights)),
            bucket_limit=range(1, len(heights) + 1),
            bucket=heights,
        )

    def _add(self, **event: Any) -> None:
        self._records.write(self._event_type(**event).SerializeToString())


def _event_file_name(number: int) -> str:
    """A name by which TensorBoard finds event files and reads them in order."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
