"""The supervisor: keeps a replica alive. It lives in the process that asked for the server."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from diffgen.args import ServerArgs, check_args
from diffgen.errors import DiffgenError, ErrorInfo, GenerationError, ServerError, StartFailed
from diffgen.server.launcher import Launcher
from diffgen.server.pipe import Place
from diffgen.server.replica import RankStatus, Replica
from diffgen.wire.mailbox import Mailbox

logger = logging.getLogger(__name__)

ALONE = Place()
_MAX_FOLDER = 80  # of the 107 bytes that the system allows for a socket's path; macOS 103
# Deaths this long ago say nothing of the present.
_WINDOW_S = 600.0
# Of earlier lives' requests, so many are told to a new one, and so much of their errors: that all fits into the message
# with which a rank starts. Clients send theirs again at once, so the latest are those that matter.
_MOST_SUSPECTS, _MOST_FAILURES, _MOST_TEXT = 1024, 64, 2000
# By the number of lives in a row that have not become ready.
_BACK_OFF_S = (0.0, 1.0, 5.0, 15.0, 30.0)


class Supervisor:
    """A replica, its folder with sockets, and what is done when it dies: it is started again.

    Requests in the last tick of a dead replica are its suspects; their deaths are counted and told to the next one,
    which runs them alone and refuses those of a second death, or of a failure while they were alone. After
    ``max_restarts`` deaths within ten minutes the supervisor gives up: ``on_failure`` is then called with the reason,
    on its thread.
    """

    def __init__(
        self,
        args: ServerArgs,
        on_failure: Callable[[DiffgenError], None] = lambda error: None,
        *,
        on_death: Callable[[tuple[str, ...]], None] = lambda journal: None,
        place: Place = ALONE,
    ) -> None:
        """``on_death`` is called with the suspects of each death; ``place`` is among several replicas."""
        check_args(args)
        self.args = args
        self.failure: DiffgenError | None = None  # why there is no replica any more
        self.restarts = 0
        self.suspects: collections.Counter[str] = collections.Counter()  # by id, deaths of the replica
        self._on_failure = on_failure
        self._on_death = on_death
        self._place = place
        self._folder = make_run_folder()
        self.socket = f"ipc://{self._folder}/s"
        self._address: str | None = None
        self._failures: dict[str, ErrorInfo] = {}
        self._replica: Replica | None = None
        self._launcher: Launcher | None = None
        self._started = False
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._wake: Mailbox[None] = Mailbox()  # for the thread to see that it is to stop
        self._thread = threading.Thread(target=self._run, name="diffgen-supervisor", daemon=True)

    @property
    def address(self) -> str | None:
        """Where rank 0 listens for others; None unless that was asked for."""
        return self._address

    def start(self) -> None:
        """Start the ranks and wait until all are ready.

        Raises the error of the first rank that fails, or :class:`StartFailed` after ``start_timeout`` seconds; no
        process is left then.
        """
        self._thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.failure or self._started or self._stopping.is_set())
        except BaseException:
            self.stop()
            raise
        if self.failure is not None:
            self._thread.join()
            raise self.failure
        if not self._started:
            raise StartFailed("stopped while it started")

    def ranks(self) -> list[RankStatus]:
        """Status of every rank of the present replica, as of now."""
        replica = self._replica
        return [] if replica is None else replica.statuses()

    def replicas(self) -> list[list[RankStatus]]:
        """:meth:`ranks` of the one replica, as a controller of several has it."""
        return [self.ranks()]

    def stop(self) -> None:
        """End the replica after its current unit, or kill it after ten seconds; remove the folder. Repeatable."""
        self._stopping.set()
        self._wake.put(None)
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            failure = self._live()
        except BaseException as error:
            # The border of the thread: without it, those who wait would wait for ever.
            logger.exception("the supervisor failed")
            failure = ServerError(f"the supervisor failed: {type(error).__name__}: {error}")
            if self._replica is not None:
                self._replica.kill()
        self._replica = None
        if self._launcher is not None:
            self._launcher.kill()
        self._wake.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if failure is not None:
            with self._changed:
                self.failure = failure
                self._changed.notify_all()
            if self._started:
                self._on_failure(failure)

    def _live(self) -> DiffgenError | None:
        """Life after life, until told to stop (None) or it makes no sense to go on (the reason)."""
        recent: list[float] = []
        stillborn = 0
        while True:
            reason = self._one_life()
            stillborn = 0 if self._replica is not None and self._replica.ready else stillborn + 1
            if reason is None or not self._started:
                return reason
            now = time.monotonic()
            # A request that fails while ranks wait for each other costs a restart, which is not the server's failure.
            died = [] if isinstance(reason, GenerationError) else [now]
            recent = [*(earlier for earlier in recent if now - earlier < _WINDOW_S), *died]
            if len(recent) > self.args.run.max_restarts:
                return reason.prefixed(f"given up after {len(recent)} failure(s) in a row, the last")
            logger.warning(
                "the ranks have ended and are started again: %s", reason, extra={"restarts": self.restarts + 1}
            )
            if self._stopping.wait(_BACK_OFF_S[min(stillborn, len(_BACK_OFF_S) - 1)]):
                return None
            self.restarts += 1

    def _one_life(self) -> DiffgenError | None:
        """Start a replica and watch it. Returns why it has died, or None when it was told to stop."""
        try:
            replica = self._replica = self._begin()
        except OSError as error:  # as of a process that may open no more files, for now
            if self._replica is not None:
                self._replica.ready = False  # nor is one now
            return StartFailed(f"the ranks cannot be started: {error}")
        while not self._stopping.is_set():
            reason = replica.watch(self._wake)
            if reason is not None:
                replica.kill()
                self._remember(replica.journal, reason)
                self._on_death(replica.journal)
                return reason
            if replica.ready and not self._started:
                with self._changed:
                    self._started, self._address = True, replica.address
                    self._changed.notify_all()
        replica.stop()
        return None

    def _begin(self) -> Replica:
        args = self.args
        _make_again(self._folder)
        if self._address is not None:
            # A port that the system chose for the first life is kept: clients know it.
            args = msgspec.structs.replace(args, listen=msgspec.structs.replace(args.listen, address=self._address))
        if self._launcher is None or self._launcher.ending() is not None:
            self._launcher = Launcher(args, self._folder)
        past = (dict(self.suspects), dict(self._failures), self._place)
        return Replica(self._launcher, args, self._folder, self.restarts, self.socket, *past)

    def _remember(self, journal: tuple[str, ...], reason: DiffgenError) -> None:
        """What the next life must know of the last tick's requests."""
        for request_id in journal:
            self.suspects[request_id] = self.suspects.pop(request_id, 0) + 1  # now the latest
        if isinstance(reason, GenerationError) and len(journal) == 1:
            self._failures[journal[0]] = reason.info().shortened(_MOST_TEXT)
        while len(self.suspects) > _MOST_SUSPECTS:
            del self.suspects[next(iter(self.suspects))]
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]


def _make_again(folder: Path) -> None:
    """The run folder, where something that cleans folders for temporary files has removed it. Raises
    :class:`StartFailed` where another user has made it meanwhile."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    if folder.lstat().st_uid != os.geteuid():
        raise StartFailed(f"{folder} is another user's now; start a new server")


def make_run_folder() -> Path:
    """A private folder (0700) with a path short enough for sockets."""
    folder = tempfile.mkdtemp(prefix="diffgen-")
    if len(folder) > _MAX_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="diffgen-", dir="/tmp")
    return Path(folder)
