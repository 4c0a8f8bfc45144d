"""The launcher: a process that imports once what a rank needs, and forks the ranks of every life.

A fork takes a few milliseconds where the imports take seconds, so a dead replica is soon back. The supervisor has a
:class:`Launcher`; the process itself is ``python -P -m diffgen.server.launcher FD``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing.connection
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn

from diffgen.args import ModelArgs, ServerArgs
from diffgen.server.pipe import FROM_LAUNCHER, TO_LAUNCHER, Exited, Fork, Forked, FromLauncher, Pipe, Prepare
from diffgen.server.rank import PARENT_CHECK_S, name_process, quieten, run

_STDERR = 2  # a rank prints nothing on purpose, but libraries do, and stdout is for results


class Launcher:
    """The supervisor's side, used by one thread. ``codes`` are the exit codes of the ranks that have ended."""

    def __init__(self, args: ServerArgs, folder: Path) -> None:
        self.codes: dict[int, int] = {}
        self._process, self._pipe = _start(args, folder)
        self.on_fork: Callable[[int], None] = lambda pid: None

    @property
    def connection(self) -> Connection:
        """Readable when there is something for :meth:`receive`."""
        return self._pipe.connection

    def fork(self, rank_end: Connection) -> None:
        """Ask for a rank with this end of its pipe, which is closed here; ``on_fork`` is told its pid."""
        with rank_end, contextlib.suppress(OSError):  # it has died: that is seen elsewhere
            self._pipe.send(Fork())
            send_handle(self.connection, rank_end.fileno(), self._process.pid)

    def receive(self) -> None:
        """Take one message. Raises :class:`EOFError` when the process has gone."""
        match self._pipe.receive():
            case Forked() as forked:
                self.codes.pop(forked.pid, None)  # of an earlier process
                self.on_fork(forked.pid)
            case Exited() as exited:
                self.codes[exited.pid] = exited.code

    def wait(self, seconds: float) -> bool:
        """Receive for at most so long; whether something came."""
        if not self.connection.poll(seconds):
            return False
        self.receive()
        return True

    def ending(self) -> str | None:
        """How its process has ended, if it has."""
        code = self._process.poll()
        return None if code is None else f"the launcher (pid {self._process.pid}) {ending(code)}"

    def settle(self) -> None:
        """See its process to the end after its pipe has closed, which comes a moment before."""
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it; ranks that it has forked end by themselves within a second or so."""
        self._process.kill()
        self._process.wait()


def _start(args: ServerArgs, folder: Path) -> tuple[subprocess.Popen[bytes], Pipe[FromLauncher]]:
    ours, theirs = multiprocessing.connection.Pipe()
    # -P keeps the working directory off sys.path: a folder "pipelines" in it is not ours. Its own session, so that a
    # terminal's Ctrl-C reaches only this process, which then ends the ranks in order.
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "diffgen.server.launcher", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,
            env={**_defaults(), **os.environ, "PYTHONPATH": _import_path()},
        )
    pipe = Pipe(ours, FROM_LAUNCHER)
    pipe.send(Prepare(args, str(folder)))
    return process, pipe


def _defaults() -> dict[str, str]:
    """What the user's environment may say otherwise.

    OpenMP's threads that spin for long, as is the default, stall by the second on cores that others use as well;
    threads that sleep at once take half as long again to wake on cores of their own. This many turns, some tens of
    microseconds, cost a few per cent of either. The other two keep imports from starting threads and from touching
    CUDA, after which a process cannot be forked.
    """
    spin = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}
    return spin | {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _import_path() -> str:
    """Lets a rank import this diffgen also where the parent found it by its own sys.path, as in a notebook."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([root, known] if known else [root])


def ending(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code} and no reason"


# The process itself.


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process("diffgen-launch")
    parent = os.getppid()
    pipe = Pipe(Connection(int(sys.argv[1])), TO_LAUNCHER)
    prepare = pipe.receive()
    assert isinstance(prepare, Prepare)
    _exit_after(parent)
    try:
        quieten(prepare.args.run.log_level)
        with contextlib.suppress(Exception):  # a rank meets the same fault, and can tell of it
            _import_all(prepare.args.model)
        _Ranks(pipe).serve()
    except EOFError:
        pass
    finally:
        # The supervisor is gone, and with it all that its folder is for.
        shutil.rmtree(prepare.folder, ignore_errors=True)


def _exit_after(parent: int) -> None:
    """Raise SystemExit soon after the parent has gone, which its pipe may not tell: a child of it may hold it open.

    By a timer, since imports take seconds and a thread would forbid the forks.
    """

    def look(number: int, frame: object) -> None:
        if os.getppid() != parent:
            sys.exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, PARENT_CHECK_S, PARENT_CHECK_S)


class _Ranks:
    """The children, ended when the supervisor has gone."""

    def __init__(self, pipe: Pipe[Prepare | Fork]) -> None:
        self._pipe = pipe
        self._alive: set[int] = set()
        # Readable when a child has ended.
        self._ended, self._wake = socket.socketpair()
        self._ended.setblocking(False)
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())

    def serve(self) -> None:
        """Fork when told to, until the supervisor has gone: then it raises :class:`EOFError`."""
        try:
            while True:
                ready = multiprocessing.connection.wait([self._pipe.connection, self._ended])
                if self._ended in ready:
                    self._ended.recv(4096)
                    self._reap()
                if self._pipe.connection in ready:
                    self._pipe.receive()
                    self._start(recv_handle(self._pipe.connection))
        finally:
            self._forget_signals()
            for pid in self._alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _start(self, descriptor: int) -> None:
        if can_fork():
            pid = os.fork()
            if pid == 0:
                self._become_rank(descriptor)
        else:
            os.set_inheritable(descriptor, True)
            command = [sys.executable, "-P", "-m", "diffgen.server.rank", str(descriptor)]
            pid = os.posix_spawn(sys.executable, command, os.environ, setsid=True)
        os.close(descriptor)
        self._alive.add(pid)
        self._pipe.send(Forked(pid))

    def _become_rank(self, descriptor: int) -> NoReturn:
        try:
            os.setsid()
            self._forget_signals()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for own in (self._pipe, self._ended, self._wake):
                own.close()
            run(descriptor)
        finally:
            os._exit(1)  # nothing of the launcher may go on here

    def _forget_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _reap(self) -> None:
        for pid in list(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.remove(pid)
                self._pipe.send(Exited(pid, os.waitstatus_to_exitcode(status)))


def can_fork() -> bool:
    """Whether a copy of this process would be whole: threads and what a driver holds are not copied."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return False
    return True


def _import_all(model: ModelArgs) -> None:
    """All that a rank with this model is going to import, as far as it is known."""
    gc.disable()  # imports make few cycles and many objects: looking for the cycles is a fifth of the time
    try:
        for name in (
            "torch.distributed",
            "diffgen.scheduler.scheduler",
            "diffgen.server.answer",
            "diffgen.wire.router",
            "diffgen.worker.executor",
            "diffgen.worker.faults",
        ):
            importlib.import_module(name)
        from diffgen.loading.hub import local_folder

        folder = local_folder(model)
        registry = importlib.import_module("pipelines.registry")
        if folder is not None:
            registry.import_family(folder, model)
    finally:
        gc.freeze()  # so that the ranks' collections leave the shared pages alone
        gc.enable()


if __name__ == "__main__":
    main()
