"""One life of a replica's processes: started together, watched together, ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import signal
import time
from pathlib import Path

from diffgen.args import ServerArgs
from diffgen.errors import PEER_FAILED, PEER_LOST, DiffgenError, ErrorInfo, StartFailed, WorkerDied, error_from
from diffgen.server.launcher import Launcher, ending
from diffgen.server.pipe import FROM_RANK, FromRank, Heartbeat, Journal, Pipe, Place, RankError, Ready, Start, Stop
from diffgen.wire.mailbox import Mailbox

# Longer than any garbage collection or page fault: a rank that is this silent is stopped or gone.
SILENCE_S = 60.0
_STOP_S = 10.0
_EXPLAIN_S = 1.0
_WATCH_S = 1.0  # how late it may be seen that a start, a sign of life or a unit is overdue


@dataclasses.dataclass
class RankStatus:
    """What is known of one rank: its process, and what its last heartbeat said."""

    rank: int
    pid: int = 0  # until it has been forked
    ready: Ready | None = None
    last_seen: float = 0.0
    heartbeat: Heartbeat | None = None
    error: DiffgenError | None = None


@dataclasses.dataclass
class _Rank:
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
        launcher: Launcher,
        args: ServerArgs,
        folder: Path,
        life: int,
        socket: str,
        deaths: dict[str, int],
        failures: dict[str, ErrorInfo],
        place: Place,
    ) -> None:
        self.ready = False
        self.journal: tuple[str, ...] = ()
        self._args = args
        self._launcher = launcher
        launcher.on_fork = self._forked
        self._born = time.monotonic()
        self._ranks: list[_Rank] = []
        self._open: dict[multiprocessing.connection.Connection, _Rank] = {}
        self._ended_at: float | None = None  # of the first rank
        try:
            for rank in range(args.run.num_gpus):
                self._spawn(Start(args, rank, str(folder), life, socket, deaths, failures, place))
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

    def watch(self, wake: Mailbox[None]) -> DiffgenError | None:
        """Wait for what the ranks say, or ``wake``, or some time; returns why the replica has ended, if it has."""
        launcher = self._launcher.connection
        patience = _WATCH_S if self._ended_at is None else _EXPLAIN_S / 10
        for connection in multiprocessing.connection.wait([launcher, wake.fileno(), *self._open], timeout=patience):
            if not isinstance(connection, multiprocessing.connection.Connection):
                continue
            if connection is launcher:
                try:
                    self._launcher.receive()
                except EOFError:
                    return self._launcher_lost()
                continue
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
            self._wait(deadline)
        self.kill()

    def kill(self) -> None:
        alive = [rank.status.pid for rank in self._ranks if rank.status.pid not in self._launcher.codes]
        if 0 in alive:  # it may be forked at any moment
            self._launcher.kill()
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid:
                    os.killpg(pid, signal.SIGKILL)
        self._wait(time.monotonic() + _STOP_S)
        for rank in self._ranks:
            rank.pipe.close()

    def _spawn(self, start: Start) -> None:
        ours, theirs = multiprocessing.connection.Pipe()
        pipe = Pipe(ours, FROM_RANK)
        self._ranks.append(_Rank(pipe, RankStatus(start.rank, last_seen=time.monotonic())))
        self._launcher.fork(theirs)
        pipe.send(start)

    def _forked(self, pid: int) -> None:
        next(rank for rank in self._ranks if not rank.status.pid).status.pid = pid

    def _wait(self, deadline: float) -> None:
        """Until every rank's end has been told, or the launcher that would tell it has gone."""
        with contextlib.suppress(EOFError):
            while any(rank.status.pid not in self._launcher.codes for rank in self._ranks):
                if not self._launcher.wait(max(0.0, deadline - time.monotonic())):
                    return

    def _launcher_lost(self) -> DiffgenError:
        # Otherwise the next life may be asked of it, and be lost as well.
        self._launcher.settle()
        kind = WorkerDied if self.ready else StartFailed
        return kind(self._launcher.ending() or "the launcher closed its pipe")

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
        """Some rank has ended: the reason is what it said, else how its process ended. That its peers failed or
        were lost is a reason only if nothing better turns up within a second."""
        if self._ended_at is None:
            return None
        late = time.monotonic() - self._ended_at > _EXPLAIN_S
        alive = self._open.values()
        for rank in (rank for rank in self._ranks if rank not in alive):
            error = rank.status.error
            if error is not None and (late or error.code not in (PEER_LOST, PEER_FAILED)):
                return error.prefixed(f"rank {rank.status.rank}")
            code = self._launcher.codes.get(rank.status.pid)
            if error is None and (late or code is not None):
                kind = WorkerDied if self.ready else StartFailed
                how = "closed its pipe" if code is None else ending(code)
                return kind(f"rank {rank.status.rank} (pid {rank.status.pid}) {how}")
        return None

    def _overdue(self) -> DiffgenError | None:
        """Something takes longer than it may: the start, a sign of life, a unit."""
        now, run = time.monotonic(), self._args.run
        if not self.ready and now - self._born > run.start_timeout:
            late = [rank.status.rank for rank in self._ranks if rank.status.ready is None]
            return StartFailed(f"ranks {late} were not ready after {run.start_timeout:g} s; see start_timeout")
        for rank in self._ranks if self.ready else []:
            silent = now - rank.status.last_seen
            if silent > SILENCE_S:
                return WorkerDied(f"rank {rank.status.rank} has given no sign of life for {silent:.0f} s")
        beats = {rank.status.rank: beat for rank in self._ranks if (beat := rank.status.heartbeat) is not None}
        since = [beat.unit_since for beat in beats.values() if beat.unit_since is not None]
        if self.ready and since and now - min(since) > run.unit_timeout:
            waiting = [rank for rank, beat in beats.items() if beat.voted]
            busy = [rank for rank, beat in beats.items() if beat.unit_since is not None and not beat.voted]
            what = f"ranks {busy or sorted(beats.keys() - waiting)} have not ended a unit after {run.unit_timeout:g} s"
            others = f", and ranks {waiting} wait for them" if waiting else ""
            return WorkerDied(f"{what}{others}; see unit_timeout")
        return None
