"""What is printed: to a pipe, to run.log, from other ranks, and on a terminal."""

import errno
import io
import logging
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from configs.layout import MeshSizes, mesh_sizes
from configs.load import load
from configs.schema import Config
from trainer.optimizers import adamw
from trainer.report import bars, step_table
from trainer.report.console import Console
from trainer.report.metrics import Kind, Memory, StepMetrics, memory_of
from trainer.report.summary import closing_rows, closing_title, next_rows, slow_attention, startup_rows
from trainer.report.units import brief, count, duration, size

ROOT = Path(__file__).parents[3]


def metrics(step, **changes):
    values = {
        "step": step,
        "loss": 8.25,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": step * 2048,
        "tokens_per_second": 4400.4,
        "step_seconds": 2.0,
        "data_seconds": 0.01,
        "mfu": None,
        "tflops": None,
        "memory_peak_bytes": 2**30,
        "memory_reserved_peak_bytes": None,
        "memory_percent": None,
        "allocator_retries": None,
        "allocator_ooms": None,
        "time": 1.7e9,
    }
    return StepMetrics(**(values | changes))


def config(**tables):
    values = {
        "job": {"name": "toy"},
        "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176, "vocab_size": 4096},
        "data": {"sources": [{"name": "s", "kind": "synthetic"}]},
        "training": {"steps": 300, "seq_len": 256, "global_batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"lr": 1e-3},
        "lr_schedule": {"total_steps": 300},
    }
    for name, table in tables.items():
        values[name] = values.get(name, {}) | table
    return Config(**values)


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


@pytest.fixture
def streams():
    return io.StringIO(), io.StringIO()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.12, "4.1 s"),
        (9.97, "10 s"),
        (59, "59 s"),
        (59.7, "1 min 00 s"),
        (151, "2 min 31 s"),
        (3599.6, "1 h 00 min"),
        (18240, "5 h 04 min"),
        (266_400, "3 d 02 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_numbers_have_three_digits():
    assert [count(n) for n in (0, 0.18672, 4.567, 94.3)] == ["0", "0.187", "4.57", "94"]
    assert [count(n) for n in (950, 9_999, 131_072, 3_341_184, 1.2358e9, 15.6e12)] == [
        "950",
        "9,999",
        "131 K",
        "3.34 M",
        "1.24 B",
        "15.6 T",
    ]
    assert [size(n) for n in (1536, 512 * 2**20, 25.61 * 2**30, 3 * 2**40)] == [
        "1.50 KiB",
        "512 MiB",
        "25.6 GiB",
        "3.00 TiB",
    ]


def test_rank_0_speaks_to_out_and_to_the_log_alike(streams, tmp_path):
    out, err = streams
    with Console(0, out, err) as console:
        console.log_to(tmp_path / "run.log")
        console.table("Title", [("label", "one\ntwo"), ("longer label", "three")])
        console.warning("careful")
    assert out.getvalue() == "\nTitle\n\n  label          one\n                 two\n  longer label   three\n"
    assert err.getvalue() == "warning: careful\n"
    logged = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ? ?", "", line) for line in lines_of(tmp_path / "run.log")]
    assert "".join(logged) == out.getvalue() + err.getvalue()


def test_a_second_launch_appends_to_the_log(tmp_path, streams):
    for text in ("first", "second"):
        with Console(0, *streams) as console:
            console.log_to(tmp_path / "run.log")
            console.line(text)
    assert [line.split("  ")[1] for line in lines_of(tmp_path / "run.log")] == ["first\n", "second\n"]


def test_other_ranks_only_warn_and_say_who_they_are(streams, tmp_path):
    out, err = streams
    with Console(3, out, err) as console:
        console.log_to(tmp_path / "run.log")
        console.line("hello")
        with console.progress("Reading") as report:
            report(1, 2)
        with console.training(0, 10, show_mfu=False):
            console.step(metrics(10, validation_loss=4.0))
        console.error("broken")
    assert out.getvalue() == ""
    assert err.getvalue() == "[rank 3] error: broken\n"
    assert not (tmp_path / "run.log").exists()


def test_warnings_of_python_and_of_libraries_come_through_and_are_handed_back(streams):
    before = warnings.showwarning
    with Console(1, *streams), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("odd", UserWarning, stacklevel=1)
        logging.getLogger("some.library").warning("odd %s", "too")
        logging.getLogger("some.library").info("not this")
    lines = streams[1].getvalue().splitlines()
    assert lines[0].startswith("[rank 1] warning: odd (UserWarning, ")
    assert lines[1:] == ["[rank 1] warning: odd too"]
    assert warnings.showwarning is before
    assert not any("Console" in repr(handler) for handler in logging.getLogger().handlers)


def rows_of(out):
    return [line for line in out.getvalue().splitlines() if line.strip()]


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a clock that a test turns."""
    now = [1000.0]
    monkeypatch.setattr(step_table.time, "monotonic", lambda: now[0])
    return now


def test_a_logged_step_is_one_row_under_its_header(streams, clock):
    console = Console(0, *streams)
    with console.training(0, 100, show_mfu=True):
        console.step(metrics(10, mfu=0.4123))
        clock[0] += 20
        console.step(metrics(20, tokens_per_second=None, step_seconds=None))
    header, first, second = rows_of(streams[0])
    assert header.split() == ["step", "loss", "grad", "norm", "lr", "tokens/s", "mfu", "time", "left"]
    assert first.split() == ["10", "8.2500", "1.5000", "3.00e-04", "4,400", "41.2%", "3", "min", "00", "s"]
    assert second.split() == ["20", "8.2500", "1.5000", "3.00e-04", "-", "-", "2", "min", "40", "s"]
    assert len({len(row) for row in (header, first, second)}) == 1


def test_an_unknown_device_has_no_mfu_column(streams):
    console = Console(0, *streams)
    with console.training(0, 100, show_mfu=False):
        console.step(metrics(100))
    assert "mfu" not in streams[0].getvalue()


def test_the_header_comes_again(streams):
    console = Console(0, *streams)
    with console.training(0, 100, show_mfu=False):
        for step in range(1, 42):
            console.step(metrics(step))
    assert [i for i, line in enumerate(rows_of(streams[0])) if "loss" in line] == [0, 21, 42]


def test_a_validation_is_said_below_the_row(streams):
    console = Console(0, *streams)
    with console.training(0, 100, show_mfu=False):
        console.step(metrics(10, loss=math.nan, validation_loss=4.5, validation_bits_per_byte=1.93))
    _, row, validation = rows_of(streams[0])
    assert row.split()[:2] == ["10", "nan"]
    assert validation.strip() == "validation loss 4.5000, 1.9300 bits per byte"


def test_a_validation_of_several_sources_says_each_below_the_whole(streams):
    console = Console(0, *streams)
    by_source = {
        "code": {"loss": 4.0, "perplexity": 54.6, "bits_per_byte": 2.0},
        "prose": {"loss": 7.5, "perplexity": 1808.04, "bits_per_byte": None},
    }
    with console.training(0, 100, show_mfu=False):
        console.step(metrics(10, validation_loss=4.5, validation_perplexity=90.017, validation_by_source=by_source))
    assert [line.strip() for line in rows_of(streams[0])[2:]] == [
        "validation loss 4.5000, perplexity 90.02",
        "code: loss 4.0000, 2.0000 bits per byte, perplexity 54.60",
        "prose: loss 7.5000, perplexity 1,808.04",
    ]


def test_progress_in_a_pipe_is_a_line_now_and_then(streams, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    console = Console(0, *streams)
    with console.progress("Encoding text") as report:
        for done in range(1, 101):
            now[0] += 0.25
            report(done, 100, f"file {done}")
    assert streams[0].getvalue().splitlines() == [
        "Encoding text ...",
        "Encoding text: 40%, 40 of 100, file 40",
        "Encoding text: 80%, 80 of 100, file 80",
        "Encoding text: done in 25 s",
    ]


def test_progress_in_bytes(streams, monkeypatch):
    monkeypatch.setattr(bars, "_PLAIN_PROGRESS_SECONDS", 0.0)
    with Console(0, *streams).progress("Encoding", in_bytes=True) as report:
        report(3 * 2**20, 12 * 2**20)
    assert "Encoding: 25%, 3.00 MiB of 12.0 MiB\n" in streams[0].getvalue()


def test_progress_in_bytes_has_its_speed_and_time_left(streams, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    with Console(0, *streams).progress("Tokenizing", in_bytes=True) as report:
        report(0, None, "checking the inputs")
        now[0] += 60
        report(10 * 2**20, 100 * 2**20)  # done by an earlier launch
        now[0] += 20
        report(30 * 2**20, 100 * 2**20)
    assert "Tokenizing: 30%, 30.0 MiB of 100 MiB, 1.00 MiB/s, 1 min 10 s left\n" in streams[0].getvalue()


def test_failed_work_is_not_said_to_be_done(streams):
    with pytest.raises(OSError, match="gone"), Console(0, *streams).progress("Reading"):
        raise OSError("gone")
    assert "done" not in streams[0].getvalue()


@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_ends_with_the_plain_rows():
    program = (
        "from tests.unit.trainer.test_console import metrics\n"
        "from trainer.report.console import Console\n"
        "with Console() as console:\n"
        "    with console.training(0, 20, show_mfu=False):\n"
        "        for step in range(1, 21):\n"
        "            console.step(metrics(step)) if step % 10 == 0 else console.advance(step)\n"
        "    console.line('the end')\n"
    )
    output = in_terminal(program)
    assert "Training" in output
    assert "━" in output
    assert re.search(r"20 +8\.2500 +1\.5000 +3\.00e-04 +4,400", output)
    assert output.index("4,400") < output.index("the end")


def in_terminal(program):
    """Run a program on a terminal of its own and return what came out."""
    terminal, child_side = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdin=child_side, stdout=child_side
    )
    os.close(child_side)
    output = b""
    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
    except OSError:  # how a terminal reports its end on Linux
        pass
    assert process.wait() == 0
    os.close(terminal)
    return output.decode()


class Closed(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_closed_terminal_leaves_the_log_alone(tmp_path):
    with Console(0, Closed(), Closed()) as console:
        console.log_to(tmp_path / "run.log")
        console.line("one")
        console.warning("two")
        with console.progress("three"):
            console.line("four")
        console.error("five")
    log = (tmp_path / "run.log").read_text()
    assert [line[21:] for line in log.splitlines()] == [
        "one",
        "warning: standard output can't be written (Broken pipe); everything is in this file",
        "warning: two",
        "warning: standard error can't be written (Broken pipe); everything is in this file",
        "three ...",
        "four",
        "three: done in 0.0 s",
        "error: five",
    ]


# --------------------------------------------------------------------------- before and after


def summary(config, **changes):
    values = {
        "sizes": MeshSizes(1, 1, 1),
        "device_name": "cpu",
        "peak": None,
        "data": ["python_stdlib: 3.5 M tokens"],
        "run_folder": Path("runs/toy"),
    }
    return dict(startup_rows(config, **(values | changes)))


def test_the_summary_shows_the_arithmetic():
    rows = summary(config(), sizes=MeshSizes(1, 2, 1))
    assert rows["ranks"] == "2 on cpu: dp_shard 2"
    assert summary(config(), sizes=MeshSizes(1, 2, 1, ep=2))["ranks"].endswith("\nexperts: ep 2 x shard 1")
    assert rows["batch"] == "8 sequences of 256 = 2,048 tokens per step (4 at once on each of 2 data-parallel ranks)"
    assert rows["steps"] == "300 = 614 K tokens"
    assert "MFU not shown" in rows["FLOPs"]
    assert "709,184" in rows["model"]
    assert "technique" not in rows


def test_the_summary_names_what_differs():
    changed = config(
        training={"compute_dtype": "bfloat16"},
        compile={"enable": True},
        activation_checkpoint={"mode": "full"},
        fsdp={"cpu_offload": True},
        metrics={"tensorboard": False},
    )
    rows = summary(changed, device_name="NVIDIA H200", peak=989.5e12, resumed_step=120)
    assert rows["technique"] == "torch.compile, activation checkpointing full, states offloaded to the CPU"
    assert summary(config(fsdp={"partition": "owner"}, optimizer={"name": "muon"}))["technique"] == (
        "optimizer by owner, Muon for the blocks' matrices"
    )
    assert rows["precision"].startswith("float32 parameters and optimizer, bfloat16 forward")
    assert "989.5 TFLOP/s" in rows["FLOPs"]
    assert "of the host's memory" in rows["memory"]
    assert "\nparameters 2.71 MiB, gradients 2.71 MiB, optimizer 5.41 MiB\n" in rows["memory"]
    assert rows["steps"].endswith("resuming from step 120")
    assert "tensorboard" not in rows["written to"]


def test_the_summary_says_what_adamw_keeps_and_what_updates(monkeypatch):
    rounded = config(optimizer={"moments_dtype": "bfloat16"})
    assert summary(rounded)["precision"] == (
        "float32 parameters, bfloat16 moments, float32 forward and backward, float32 reduction"
    )
    rounded = config(optimizer={"rounding": "stochastic"}, training={"dtype": "bfloat16"})
    assert summary(rounded)["precision"] == (
        "stochastically rounded bfloat16 parameters and optimizer, float32 forward and backward, float32 reduction"
    )
    for has_triton, expected in ((True, "Keel's kernel of AdamW"), (False, "torch's kernel of AdamW")):
        monkeypatch.setattr(adamw, "has_triton", lambda has=has_triton: has)
        assert summary(config(), device_name="NVIDIA H200")["technique"] == expected


def test_attention_that_must_write_out_its_scores_is_warned_of():
    documents = config().data.model_copy(update={"document_mask": True})
    in_float32 = config().model_copy(update={"data": documents})
    (warning,) = slow_attention(in_float32, "cuda")
    assert "under a mask of all pairs, 64.0 KiB per sequence" in warning
    cut = in_float32.model_copy(update={"mesh": in_float32.mesh.model_copy(update={"cp": 2})})
    assert "tile by tile" in next(slow_attention(cut, "cuda"))
    assert list(slow_attention(in_float32, "cpu")) == []
    assert list(slow_attention(config(), "cuda")) == []
    in_bfloat16 = config(training={"compute_dtype": "bfloat16"}).model_copy(update={"data": documents})
    assert list(slow_attention(in_bfloat16, "cuda")) == []


def test_the_closing_says_where_everything_is_and_what_took_the_time():
    seconds = dict.fromkeys(Kind, 0.0) | {Kind.TRAINING: 120.0, Kind.CHECKPOINT: 2.5}
    newest = Path("runs/toy/checkpoints/x")
    rows = dict(closing_rows(config(), Path("runs/toy"), seconds, (8.3, 4.4), Memory(2**29), newest))
    assert rows["time"] == "2 min 02 s\ntraining 2 min 00 s, checkpoint 2.5 s"
    assert rows["memory"] == "512 MiB at the peak, of the whole process with Python and torch"
    assert rows["loss"] == "8.3000 at first, 4.4000 at last"
    assert rows["curves"] == "tensorboard --logdir runs/toy/tensorboard"
    spaced = dict(closing_rows(config(), Path("my runs/toy"), seconds, None, Memory(2**29), newest))
    assert shlex.split(spaced["curves"]) == ["tensorboard", "--logdir", "my runs/toy/tensorboard"]
    assert rows["checkpoint"] == "runs/toy/checkpoints/x"
    assert closing_title(config(), "preempted", 120, "SIGTERM").startswith("Stopped by SIGTERM after step 120")


def test_a_run_that_has_more_steps_than_it_is_to_train_has_nothing_to_do():
    wanted = config().training.steps
    assert closing_title(config(), "done", wanted, "") == f"Done: step {wanted:,} reached."
    title = closing_title(config(), "done", 3 * wanted, "")
    assert title == f"Nothing to do: the run is at step {3 * wanted:,}, and training.steps = {wanted}."
    [(how, command), *_] = next_rows(config(lr_schedule={"total_steps": 10 * wanted}), "done", step=3 * wanted)
    assert how == "continue to twice the steps"
    assert command.endswith(f"--training.steps {6 * wanted}")


def test_the_closing_says_what_the_device_had_reserved_and_lacked():
    seconds = dict.fromkeys(Kind, 1.0)
    for counts, expected in {
        (60 * 2**30, 70 * 2**30, 0, 0, 80 * 2**30): "60.0 GiB at the peak, 70.0 GiB reserved (87.5% of the device's)",
        (60 * 2**30, 70 * 2**30, 3, 1, 80 * 2**30): "60.0 GiB at the peak, 70.0 GiB reserved (87.5% of the device's)\n"
        "allocator retries 3 (it freed memory and tried again, which is slow), times it ran out 1",
    }.items():
        rows = dict(closing_rows(config(), Path("runs/toy"), seconds, None, memory_of(list(counts)), None))
        assert rows["memory"] == expected


def test_the_percent_of_the_memory_is_a_column_where_there_is_one(streams):
    out, _ = streams
    with Console(0, *streams) as console, console.training(0, 10, show_mfu=False, show_memory=True):
        console.step(metrics(1, memory_percent=87.5))
        console.step(metrics(2))
    header, *rows = (line.split() for line in out.getvalue().strip().splitlines())
    assert header[-3:] == ["memory", "time", "left"]
    assert [row[5] for row in rows] == ["87.5%", "-"]


def test_the_time_left_includes_validations_and_saves_and_does_not_jump(clock):
    """Steps of 1 s but for the first, which compiles; 20 s of validation every 50 and 6 s of saving every 80 steps."""
    table = step_table.StepTable(1000, show_mfu=False, show_memory=False)
    estimates = {}
    begun = clock[0]
    for step in range(1, 1001):
        clock[0] += 60 if step == 1 else 1
        clock[0] += 20 * (step % 50 == 0) + 6 * (step % 80 == 0)
        if step % 10 == 0:
            table.row(metrics(step, step_seconds=1.0))
            estimates[step] = table._seconds_per_step * (1000 - step), clock[0] - begun
    whole = clock[0] - begun
    for step in range(200, 1000, 10):
        left, spent = estimates[step]
        assert left == pytest.approx(whole - spent, rel=0.12, abs=25), step


def test_the_time_left_follows_a_run_that_has_become_slower(clock):
    table = step_table.StepTable(10**6, show_mfu=False, show_memory=False)
    for step in range(10, 60_000, 10):
        clock[0] += 10 if step < 50_000 else 30
        table.row(metrics(step))
    assert table._seconds_per_step == pytest.approx(3.0)


def test_the_time_left_after_a_run_has_gone_back(clock):
    table = step_table.StepTable(100, show_mfu=False, show_memory=False)
    for step in (10, 20, 30, 10, 20):
        clock[0] += 40
        row = table.row(metrics(step))
    assert row.endswith("5 min 20 s")


JOBS = [
    ("debug", 1),
    ("debug", 2),
    ("my_text", 1),
    ("llama_1b", 8),
    ("llama_7b", 8),
    pytest.param("llama_405b", 1024, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "ranks"), [*JOBS, ("deepseek_moe_16b", 64)])
@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3"])
def test_no_line_is_longer_than_a_terminal_of_80_columns(streams, monkeypatch, job, ranks, device):
    words = ["train", "--config", f"{job}.toml", "--training.learning_rate", "0.0003"]
    monkeypatch.setattr(sys, "argv", [*words, "--job.output_dir", "runs/an experiment with a name of several words"])
    config = load(job, world_size=ranks).config
    peak, console, folder = None if device == "cpu" else 989.5e12, Console(0, *streams), Path("runs/some_run")
    seconds = dict.fromkeys(Kind, 10000.0)
    console.table(
        "Keel trains", startup_rows(config, mesh_sizes(config, ranks), device, peak, ["s: text x"], folder, 5)
    )
    with console.training(0, 10**6, show_mfu=device != "cpu", show_memory=device != "cpu"):
        console.step(metrics(123_456, mfu=0.412, memory_percent=91.4, tokens_per_second=1_234_567.0, step_seconds=9.9))
        console.step(metrics(200_000, grad_norm=99_999, validation_loss=4.5, validation_bits_per_byte=1.9))
    memory = memory_of([60 * 2**30, 70 * 2**30, 3, 1, 80 * 2**30])
    console.table("Done", closing_rows(config, folder, seconds, (8.3, 4.4), memory, folder))
    console.commands("What to try next", next_rows(config, "done"))
    lines = streams[0].getvalue().splitlines()
    assert len(lines) > 25
    assert [line for line in lines if len(line) > 80] == []


def test_a_table_keeps_numbers_with_their_units(streams):
    text = ", ".join(f"part {number} {number} min {number} s" for number in range(10, 20))
    Console(0, *streams).table("Title", [("time", text), ("long", "word " * 30), ("path", "a/long/path" * 9)])
    lines = streams[0].getvalue().splitlines()[3:]
    assert lines[0] == "  time   part 10 10 min 10 s, part 11 11 min 11 s, part 12 12 min 12 s,"
    assert lines[4] == "  long   " + "word " * 13 + "word"
    assert lines[-1] == "  path   " + "a/long/path" * 9


def test_commands_to_paste_are_the_same_in_several_lines(streams):
    command = "keel train job.toml --job.name 'a name with spaces' --data.prepare.input " + "'a folder' " * 9
    Console(0, *streams).commands("Next", [("do this", command), ("or this", "keel train --help")])
    out = streams[0].getvalue()
    first, second = out.partition("  do this\n")[2].split("  or this\n")
    assert first.count("\\\n") == 2
    assert "--job.name 'a name with spaces'" in first
    assert max(map(len, out.splitlines())) <= 80
    done = subprocess.run(["sh", "-c", f"keel() {{ printf '%s\\n' \"$@\"; }}\n{first}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == shlex.split(command)[1:]
    assert second == "    keel train --help\n"


def test_a_long_line_breaks_between_words_on_a_terminal():
    program = (
        "from trainer.report.console import Console\n"
        "with Console() as console:\n"
        "    console.line('  ' + 'several words ' * 10 + 'a/long/path' * 12)\n"
    )
    lines = in_terminal(program).split("\r\n")
    assert lines[0] == "  " + "several words " * 6 + "several words"
    assert lines[1] == "  several words several words several words"
    assert lines[2] == "  " + "a/long/path" * 12


@pytest.fixture
def launched(monkeypatch):
    """By torchrun, on one rank."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "debug.toml", "--training.steps", "300"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.mark.usefixtures("launched")
def test_what_to_try_next_can_be_pasted():
    rows = dict(next_rows(config(), "done"))
    how = "continue to twice the steps, past lr_schedule.total_steps (minimum rate)"
    assert rows[how] == "torchrun train.py --config debug.toml --training.steps 600"
    longer = dict(next_rows(config(lr_schedule={"total_steps": 10_000}), "done"))
    assert longer["continue to twice the steps"].endswith("--training.steps 600")
    longer = dict(next_rows(config(lr_schedule={"total_steps": 400}), "done"))
    assert longer["continue to the end of the schedule"].endswith("--training.steps 400")
    assert rows["the same curve from two ranks"] == (
        "torchrun --nproc-per-node 2 train.py --config debug.toml --training.steps 300 --job.name toy-2-ranks"
    )
    assert "the same curve from two ranks" not in dict(next_rows(config(training={"micro_batch_size": 8}), "done"))
    assert "the same curve from two ranks" not in dict(next_rows(config(), "done", is_fork=True))
    assert rows["another seed, as a separate run"].endswith("--job.name toy-seed-1 --training.seed 1")
    other = dict(next_rows(config(training={"seed": 1}), "done"))["another seed, as a separate run"]
    assert other.endswith("--job.name toy-seed-2 --training.seed 2")
    own_folder = dict(next_rows(config(job={"output_dir": "out/"}), "done"))
    assert "--job.output_dir out-seed-1" in own_folder["another seed, as a separate run"]


@pytest.mark.usefixtures("launched")
def test_after_a_stop_the_same_command_goes_on():
    assert next_rows(config(), "preempted") == [
        ("resume from the newest checkpoint", "torchrun train.py --config debug.toml --training.steps 300")
    ]


@pytest.mark.usefixtures("launched")
def test_what_to_try_next_does_not_repeat_how_this_launch_began(monkeypatch):
    """`none` starts anew every time, and a run of another seed cannot go on from this one's checkpoint."""
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--checkpoint.load", "none"])
    [(_, command)] = next_rows(config(checkpoint={"load": "none"}), "preempted")
    assert command == "torchrun train.py --config debug.toml --training.steps 300 --checkpoint.load latest"
    began = ["--checkpoint.load", "200", "--checkpoint.go_back=1"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "debug.toml", *began])
    went_back = config(checkpoint={"load": 200, "go_back": 1})
    [(_, command)] = next_rows(went_back, "preempted")
    assert command == f"torchrun train.py --config debug.toml {' '.join(began)}"
    rows = dict(next_rows(went_back, "done"))
    assert rows["another seed, as a separate run"] == (
        "torchrun train.py --config debug.toml --job.name toy-seed-1 --checkpoint.load latest --checkpoint.go_back 0 "
        "--training.seed 1"
    )


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (brief(0.9996), "1.0 s"),
        (brief(0.9994), "999 ms"),
        (count(999.6e6), "1.00 B"),
        (count(999.4e6), "999 M"),
        (count(9.996e6), "10.0 M"),
        (count(9994), "9,994"),
        (size(1023.8 * 2**20), "1.00 GiB"),
        (size(1023.4 * 2**20), "1023 MiB"),
        (size(99.96 * 2**30), "100 GiB"),
    ],
)
def test_what_rounds_up_to_a_unit_is_shown_in_it(written, text):
    assert written == text
