"""The supervisor: starts the ranks, watches them, ends them. It lives in the process that asked for the server."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from diffgen.args import ServerArgs, check_args
from diffgen.errors import PEER_LOST, DiffgenError, StartFailed, WorkerDied, error_from
from diffgen.server.pipe import FROM_RANK, FromRank, Heartbeat, Pipe, RankError, Ready, Start, Stop

# Longer than any garbage collection or page fault: a rank that is this silent is stopped or gone.
SILENCE_S = 60.0
_STOP_S = 10.0
_EXPLAIN_S = 1.0
_MAX_SOCKET_PATH = 100  # of the 107 bytes that the system allows


@dataclasses.dataclass
class RankStatus:
    """What is known of one rank: its process, and what its last heartbeat said."""

    rank: int
    pid: int
    ready: Ready | None = None
    last_seen: float = 0.0
    heartbeat: Heartbeat | None = None
    error: DiffgenError | None = None


@dataclasses.dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Pipe[FromRank]
    status: RankStatus


class Supervisor:
    """One replica: its processes, their pipes and the folder with their sockets.

    The first failure of any rank ends all of them. ``on_failure`` is called with the reason, on the watching thread,
    if that happens after :meth:`start` has returned.
    """

    def __init__(self, args: ServerArgs, on_failure: Callable[[DiffgenError], None] = lambda error: None) -> None:
        check_args(args)
        self.args = args
        self._on_failure = on_failure
        self._folder = _make_run_folder()
        self.socket = f"ipc://{self._folder}/s"
        self._ranks: list[_Rank] = []
        self._changed = threading.Condition()
        self._stopping = False
        self.failure: DiffgenError | None = None
        self._watcher = threading.Thread(target=self._watch, name="diffgen-supervisor", daemon=True)

    @property
    def address(self) -> str | None:
        """Where rank 0 listens for others, once it is ready."""
        ready = self._ranks[0].status.ready if self._ranks else None
        return None if ready is None or self.args.listen.address is None else ready.address

    def start(self) -> None:
        """Start every rank and wait until all are ready.

        Raises the error of the first rank that fails, or :class:`StartFailed` after ``start_timeout`` seconds; no
        process is left then.
        """
        try:
            for rank in range(self.args.run.num_gpus):
                self._ranks.append(self._spawn(rank))
            self._watcher.start()
            timeout = self.args.run.start_timeout
            with self._changed:
                done = self._changed.wait_for(lambda: self.failure is not None or self._all_ready(), timeout)
            if not done:
                late = [rank.status.rank for rank in self._ranks if rank.status.ready is None]
                raise StartFailed(f"ranks {late} were not ready after {timeout:g} s; see start_timeout")
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self._end_all()
            raise

    def ranks(self) -> list[RankStatus]:
        """Status of every rank, as of now."""
        with self._changed:
            return [dataclasses.replace(rank.status) for rank in self._ranks]

    def stop(self) -> None:
        """End every rank after its current unit, or kill it after ten seconds; remove the folder. Repeatable."""
        with self._changed:
            if self._stopping and not self._ranks:
                return
            self._stopping = True
        if self._ranks and self._all_ready() and self.failure is None:
            self._ranks[0].pipe.send(Stop())
            deadline = time.monotonic() + _STOP_S
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._end_all()

    def _spawn(self, rank: int) -> _Rank:
        ours, theirs = multiprocessing.connection.Pipe()
        # -P keeps the working directory off sys.path: a folder "pipelines" in it is not ours. Its own session, so that
        # a terminal's Ctrl-C reaches only this process, which then ends the ranks in order.
        command = [sys.executable, "-P", "-m", "diffgen.server.rank", str(theirs.fileno())]
        environment = {**os.environ, **_import_path()}
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                start_new_session=True,
                env=environment,
            )
        pipe = Pipe(ours, FROM_RANK)
        pipe.send(Start(self.args, rank, str(self._folder), self.socket))
        return _Rank(process, pipe, RankStatus(rank, process.pid, last_seen=time.monotonic()))

    def _all_ready(self) -> bool:
        return all(rank.status.ready is not None for rank in self._ranks)

    def _watch(self) -> None:
        ranks = list(self._ranks)
        open_pipes = {rank.pipe.connection: rank for rank in ranks}
        ended_at: float | None = None  # of the first rank
        while not (self._stopping or self.failure is not None):
            for connection in multiprocessing.connection.wait(list(open_pipes), timeout=0.2):
                rank = open_pipes[connection]  # type: ignore[index]
                try:
                    self._on_message(rank, rank.pipe.receive())
                except EOFError:
                    del open_pipes[rank.pipe.connection]
                    ended_at = ended_at or time.monotonic()
            if ended_at is not None:
                self._explain_end(ranks, open_pipes.values(), time.monotonic() - ended_at)
            self._check_silence(ranks)

    def _on_message(self, rank: _Rank, message: FromRank) -> None:
        with self._changed:
            rank.status.last_seen = time.monotonic()
            match message:
                case Ready():
                    rank.status.ready = message
                case Heartbeat():
                    rank.status.heartbeat = message
                case RankError():
                    rank.status.error = error_from(message.error)
            self._changed.notify_all()

    def _explain_end(self, ranks: list[_Rank], alive: Collection[_Rank], seconds: float) -> None:
        """Some rank has ended. The reason is what it said, else how its process ended; that it lost its peers is one
        only if nothing better turns up within a second."""
        ended = [rank for rank in ranks if rank not in alive]
        late = seconds > _EXPLAIN_S
        for rank in ended:
            error = rank.status.error
            if error is not None and (late or error.code != PEER_LOST):
                return self._fail(error.prefixed(f"rank {rank.status.rank}"))
            if error is None and (late or rank.process.poll() is not None):
                kind = WorkerDied if self._all_ready() else StartFailed
                return self._fail(kind(f"rank {rank.status.rank} (pid {rank.status.pid}) {_ending(rank.process)}"))
        return None

    def _check_silence(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            silent = time.monotonic() - rank.status.last_seen
            if rank.status.ready is not None and silent > SILENCE_S:
                self._fail(WorkerDied(f"rank {rank.status.rank} has given no sign of life for {silent:.0f} s"))

    def _fail(self, error: DiffgenError) -> None:
        with self._changed:
            if self._stopping or self.failure is not None:
                return
            started = self._all_ready()
            self.failure = error
            self._changed.notify_all()
        if started:
            self._end_all()
            self._on_failure(error)

    def _end_all(self) -> None:
        """Kill what still runs, and remove what the replica has on disk."""
        with self._changed:
            self._stopping = True
            ranks, self._ranks = self._ranks, []
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()
        for rank in ranks:
            rank.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _make_run_folder() -> Path:
    """A private folder (0700) with a path short enough for sockets."""
    folder = tempfile.mkdtemp(prefix="diffgen-")
    if len(folder) > _MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="diffgen-", dir="/tmp")
    return Path(folder)


def _import_path() -> dict[str, str]:
    """Lets a rank import this diffgen also where the parent found it by its own sys.path, as in a notebook."""
    import diffgen

    root = str(Path(diffgen.__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([root, known] if known else [root])}


def _stderr() -> int:
    # A rank prints nothing on purpose, but libraries do, and stdout is for results.
    return 2


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "closed its pipe"
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code} and no reason"
