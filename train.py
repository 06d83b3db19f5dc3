"""Train a model: `torchrun train.py --config debug.toml`; `python train.py --help` lists every key.

This file only sets the order: signal handlers are installed before torch is imported, which takes seconds in which a
signal would be lost; `--help` and the checks of a config run without torch; the outcome becomes an exit code.
"""

import os
import sys
from contextlib import suppress
from typing import NoReturn

import scripts  # Keel's own packages come first

if __name__ == "__main__":
    import scripts.silent_interrupts  # noqa: F401 - until the handlers are installed

from configs.command_line import answer, load_for_run, parse_command_line
from configs.errors import KeelError
from configs.process import prepare_streams, require_current_folder
from parallelisms.toolchain import require_cache_folders
from trainer.guards.fragmentation import let_segments_grow
from trainer.lifecycle import install_signal_handlers, tell_torchrun
from trainer.planning.for_validate import check_names, say_choice, say_stages


def main() -> int:
    """Run the command line.

    Returns:
        The exit code: 0 done, 75 stopped by a signal, 78 config error, 1 any other error.
    """
    prepare_streams()
    stop = install_signal_handlers()
    try:
        require_current_folder()
        command = parse_command_line(sys.argv[1:])
        if answer(command, chooser=say_choice, check_names=check_names, stages=say_stages):
            return 0
        job = load_for_run(command)
        require_cache_folders(os.environ)
    except KeelError as error:
        tell_torchrun(str(error))
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            print(error, file=sys.stderr)
        elif not stop.wait(5.0):  # torchrun stops this rank once rank 0 has reported the error
            print(f"[rank {rank}] {error}", file=sys.stderr)
        return error.exit_code
    let_segments_grow(os.environ)
    from trainer.run import run

    return run(job, stop)


def end_process(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, in which process groups left open by an error may abort the process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed terminal or pipe
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
