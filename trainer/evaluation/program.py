"""The process that evaluates a checkpoint alongside its run: python -m trainer.evaluation.program RUN STEP.

It is nicer than the run, takes its settings from the run's config.toml, and ends when the run's process does, however
that dies: its standard input is a pipe from there.
"""

import os
import sys
import threading
from pathlib import Path

from configs.errors import KeelError
from configs.load import load
from trainer.evaluation.results import write_result
from trainer.evaluation.tasks import evaluate
from trainer.sampling.load import load_trained

NICENESS = 10


def main() -> int:
    """Evaluate; returns the exit code. The last line of the output says what went wrong."""
    run = Path(sys.argv[1])
    step = int(sys.argv[2])
    os.nice(NICENESS)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        settings = load(str(run / "config.toml")).config.evaluation
        trained = load_trained(run, step, settings.device)
        write_result(run, step, evaluate(trained, settings))
    except KeelError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    return 0


def _end_with_the_run() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would abort this process at its own end
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
