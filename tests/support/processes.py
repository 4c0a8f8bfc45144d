"""Looking at the processes, folders and shared memory that a run leaves behind."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

DIFFGEN = [sys.executable, "-m", "diffgen"]


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until ``condition`` holds; fails the test with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def rank_processes(run_root: Path, kind: str = "rank") -> list[psutil.Process]:
    """Ranks, alive, of a run whose TMPDIR is ``run_root``; or its launcher, for "launch", or both, for ""."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or not process.name().startswith(f"diffgen-{kind}"):
                continue
            if process.environ().get("TMPDIR") == str(run_root):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm, without the semaphores of other programs' multiprocessing: ranks have none."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.mp-")}


def leftovers(run_root: Path) -> list[str]:
    """Processes and run folders, with their sockets, of a run whose TMPDIR is ``run_root``."""
    return [*map(str, rank_processes(run_root, "")), *glob.glob(f"{run_root}/diffgen-*")]


@contextmanager
def run_root() -> Iterator[Path]:
    """A TMPDIR short enough for sockets, empty before and after."""
    with tempfile.TemporaryDirectory(prefix="dg") as folder:
        yield Path(folder)


@contextmanager
def script(text: str, root: Path, *arguments: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A plain Python script as a user would run it, with its output on pipes; killed at the end."""
    path = root / "script.py"
    path.write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(root)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str], prefix: str) -> str:
    """The rest of the next line of stdout that begins with ``prefix``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return line[len(prefix) :].strip()
    assert process.stderr is not None
    raise AssertionError(f"no line {prefix!r}; stderr: {process.stderr.read()}")
