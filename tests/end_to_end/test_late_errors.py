"""A file system that reports errors for what it has done, as seen from the real command line: a library preloaded
before the C library fails calls on demand."""

import shutil
import subprocess
from pathlib import Path

import pytest

from checkpoint.manifest import steps_in
from tests.end_to_end.launch import curve, launch, status

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *wanted(void) { const char *v = getenv("FAULT"); return v ? v : ""; }
static int refuse(void) { errno = EIO; return -1; }
static int ends_in(const char *path, const char *end) {
    size_t n = strlen(path), k = strlen(end);
    return n >= k && !strcmp(path + n - k, end);
}
static void path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = 0;
}

int rename(const char *from, const char *to) {
    int result = REAL(rename)(from, to);
    const char *name = strstr(to, "/checkpoints/step-");
    int is_commit = name && !strchr(name + strlen("/checkpoints/"), '/') && !ends_in(to, ".tmp");
    return !strcmp(wanted(), "rename") && is_commit && !result ? refuse() : result;
}

int fsync(int descriptor) {
    char path[PATH_MAX];
    path_of(descriptor, path);
    return !strcmp(wanted(), "fsync") && ends_in(path, "/run/checkpoints") ? refuse() : REAL(fsync)(descriptor);
}

/* Writing fails, and so does what would clean up after it. */
int close(int descriptor) {
    char path[PATH_MAX];
    path_of(descriptor, path);
    int result = REAL(close)(descriptor);
    return !strcmp(wanted(), "close") && strstr(path, "/run/checkpoints/step-") ? refuse() : result;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc to build the library with")
    folder = tmp_path_factory.mktemp("library")
    (folder / "late.c").write_text(LIBRARY)
    built = folder / "late.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, folder / "late.c", "-ldl"], check=True)
    return built


def environment(library: Path, fault: str) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), "FAULT": fault}


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        pytest.param("sync", "rename", marks=pytest.mark.slow),
        pytest.param("async", "fsync", marks=pytest.mark.slow),
        pytest.param("sync", "fsync", marks=pytest.mark.long),
        pytest.param("async", "rename", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_that_is_there_counts(tmp_path: Path, library: Path, mode: str, fault: str):
    """The last step's is saved twice: at the interval, and at the end."""
    words = f"--training.steps 20 --checkpoint.interval 10 --checkpoint.mode {mode}"
    out = launch(tmp_path, words, env=environment(library, fault), preloaded=False).out
    assert "could not be written" not in out
    assert steps_in(tmp_path / "run" / "checkpoints") == [10, 20]
    assert (status(tmp_path / "run")["state"], len(curve(tmp_path / "run"))) == ("done", 20)
    launch(tmp_path, "--training.steps 22")
    assert [step for step, *_ in curve(tmp_path / "run")] == list(range(1, 23))


@pytest.mark.slow
def test_a_save_whose_clean_up_fails_ends_the_run_at_once(tmp_path: Path, library: Path):
    words = "--training.steps 100000 --checkpoint.interval 5"
    outcome = launch(tmp_path, words, env=environment(library, "close"), preloaded=False, expect=1)
    assert "failed saves in a row: 3" in outcome.err
    assert "Traceback" not in outcome.err
