"""One life of a replica's processes: started together, watched together, ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from diffgen.args import ServerArgs
from diffgen.errors import PEER_LOST, DiffgenError, ErrorInfo, StartFailed, WorkerDied, error_from
from diffgen.server.pipe import FROM_RANK, FromRank, Heartbeat, Journal, Pipe, RankError, Ready, Start, Stop

# Longer than any garbage collection or page fault: a rank that is this silent is stopped or gone.
SILENCE_S = 60.0
_STOP_S = 10.0
_EXPLAIN_S = 1.0
_STDERR = 2  # a rank prints nothing on purpose, but libraries do, and stdout is for results


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


class Replica:
    """The ranks of one life. One thread owns it; others may read :meth:`statuses` and :attr:`ready`.

    Attributes:
        ready: every rank has said that it is.
        journal: ids of the requests in the last tick that began.
    """

    def __init__(
        self,
        args: ServerArgs,
        folder: Path,
        life: int,
        socket: str,
        deaths: dict[str, int],
        failures: dict[str, ErrorInfo],
    ) -> None:
        self.ready = False
        self.journal: tuple[str, ...] = ()
        self._args = args
        self._born = time.monotonic()
        self._ranks: list[_Rank] = []
        self._open: dict[multiprocessing.connection.Connection, _Rank] = {}
        self._ended_at: float | None = None  # of the first rank
        try:
            for rank in range(args.run.num_gpus):
                self._ranks.append(_spawn(Start(args, rank, str(folder), life, socket, deaths, failures)))
        except BaseException:
            self.kill()
            raise
        self._open = {rank.pipe.connection: rank for rank in self._ranks}

    @property
    def address(self) -> str | None:
        """Where rank 0 listens for others, once it is ready and if it was asked to."""
        ready = self._ranks[0].status.ready
        return None if ready is None or self._args.listen.address is None else ready.address

    def statuses(self) -> list[RankStatus]:
        return [dataclasses.replace(rank.status) for rank in self._ranks]

    def watch(self, seconds: float) -> DiffgenError | None:
        """Take what the ranks say, for at most about ``seconds``; returns why the replica has ended, if it has."""
        for connection in multiprocessing.connection.wait(list(self._open), timeout=seconds):
            assert isinstance(connection, multiprocessing.connection.Connection)
            rank = self._open[connection]
            try:
                self._take(rank, rank.pipe.receive())
            except EOFError:
                del self._open[connection]
                self._ended_at = self._ended_at or time.monotonic()
        self.ready = all(rank.status.ready is not None for rank in self._ranks)
        return self._end_reason() or self._overdue()

    def stop(self) -> None:
        """End after the current unit, or at once where that takes more than ten seconds; no process is left."""
        if self.ready:
            self._ranks[0].pipe.send(Stop())
            deadline = time.monotonic() + _STOP_S
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            rank.pipe.close()

    def _take(self, rank: _Rank, message: FromRank) -> None:
        rank.status.last_seen = time.monotonic()
        match message:
            case Ready():
                rank.status.ready = message
            case Heartbeat():
                rank.status.heartbeat = message
            case Journal():
                self.journal = message.ids
            case RankError():
                rank.status.error = error_from(message.error)

    def _end_reason(self) -> DiffgenError | None:
        """Some rank has ended: the reason is what it said, else how its process ended. That it lost its peers is a
        reason only if nothing better turns up within a second."""
        if self._ended_at is None:
            return None
        late = time.monotonic() - self._ended_at > _EXPLAIN_S
        alive = self._open.values()
        for rank in (rank for rank in self._ranks if rank not in alive):
            error = rank.status.error
            if error is not None and (late or error.code != PEER_LOST):
                return error.prefixed(f"rank {rank.status.rank}")
            if error is None and (late or rank.process.poll() is not None):
                kind = WorkerDied if self.ready else StartFailed
                return kind(f"rank {rank.status.rank} (pid {rank.status.pid}) {_ending(rank.process)}")
        return None

    def _overdue(self) -> DiffgenError | None:
        """Something takes longer than it may: the start, a sign of life, a unit."""
        now, run = time.monotonic(), self._args.run
        if not self.ready and now - self._born > run.start_timeout:
            late = [rank.status.rank for rank in self._ranks if rank.status.ready is None]
            return StartFailed(f"ranks {late} were not ready after {run.start_timeout:g} s; see start_timeout")
        for rank in self._ranks if self.ready else []:
            name, beat = f"rank {rank.status.rank}", rank.status.heartbeat
            if now - rank.status.last_seen > SILENCE_S:
                return WorkerDied(f"{name} has given no sign of life for {now - rank.status.last_seen:.0f} s")
            if beat is not None and beat.unit_since is not None and time.time() - beat.unit_since > run.unit_timeout:
                return WorkerDied(f"{name} has been in one unit for over {run.unit_timeout:g} s; see unit_timeout")
        return None


def _spawn(start: Start) -> _Rank:
    ours, theirs = multiprocessing.connection.Pipe()
    # -P keeps the working directory off sys.path: a folder "pipelines" in it is not ours. Its own session, so that a
    # terminal's Ctrl-C reaches only this process, which then ends the ranks in order.
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "diffgen.server.rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,
            env={**_thread_waits(), **os.environ, "PYTHONPATH": _import_path()},
        )
    pipe = Pipe(ours, FROM_RANK)
    pipe.send(start)
    return _Rank(process, pipe, RankStatus(start.rank, process.pid, last_seen=time.monotonic()))


def _thread_waits() -> dict[str, str]:
    """How long a rank's OpenMP threads spin before they sleep, unless the user's environment says it.

    Threads that spin for long, as is the default, stall by the second on cores that others use as well; threads that
    sleep at once take half as long again to wake on cores of their own. This many turns, some tens of microseconds,
    cost a few per cent of either.
    """
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}


def _import_path() -> str:
    """Lets a rank import this diffgen also where the parent found it by its own sys.path, as in a notebook."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([root, known] if known else [root])


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "closed its pipe"
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code} and no reason"
