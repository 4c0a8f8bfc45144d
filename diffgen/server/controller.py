"""DataParallelController: several replicas of a model behind one address."""

from __future__ import annotations

import collections
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from diffgen.args import ListenArgs, RunArgs, ServerArgs, check_args
from diffgen.distributed.dims import ranks_of_replica
from diffgen.errors import DiffgenError, ServerError
from diffgen.server.backend import Backend
from diffgen.server.pipe import Place
from diffgen.server.relay import Relay
from diffgen.server.replica import RankStatus
from diffgen.server.supervisor import Supervisor, make_run_folder
from diffgen.wire.mailbox import Mailbox
from diffgen.wire.messages import Closing
from diffgen.wire.router import Router

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Died:
    """A replica has died and is started again, or is gone for good for a reason; ``suspects`` may be why."""

    replica: int
    suspects: tuple[str, ...]
    reason: DiffgenError | None = None


class DataParallelController:
    """Starts ``dp_size`` replicas, each with a supervisor, and shares out requests by ``dp_policy``.

    It speaks the clients' protocol on both sides: to clients as a server, to each replica as a client. When a replica
    dies, its requests go to the others, but for those of its last tick, which may be why it died: they wait for its
    next life and run there alone. Control operations are all or nothing: if one replica cannot start, none is left;
    a status is that of all.
    """

    def __init__(self, args: ServerArgs, on_failure: Callable[[DiffgenError], None] = lambda error: None) -> None:
        check_args(args)
        self.args = args
        self.failure: DiffgenError | None = None
        self._on_failure = on_failure
        self._folder = make_run_folder()
        self.socket = f"ipc://{self._folder}/s"
        self._inbox: Mailbox[Any] = Mailbox()
        self._supervisors = [self._supervise(index) for index in range(args.run.dp_size)]
        self._router: Router | None = None
        self._relay: Relay | None = None
        self._early: collections.deque[tuple[bytes, Any]] = collections.deque()  # of clients, while it is not ready
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="diffgen-controller", daemon=True)

    def _supervise(self, index: int) -> Supervisor:
        run = self.args.run
        ranks = ranks_of_replica(run)
        alone = msgspec.structs.replace(run, num_gpus=ranks, dp_size=1, dp_policy=RunArgs().dp_policy)
        args = msgspec.structs.replace(self.args, run=alone, listen=ListenArgs())
        return Supervisor(
            args,
            lambda error: self._inbox.put(_Died(index, tuple(self._supervisors[index].suspects), error)),
            on_death=lambda journal: self._inbox.put(_Died(index, journal)),
            place=Place(index * ranks, run.num_gpus - ranks),
        )

    @property
    def address(self) -> str | None:
        """Where the controller listens for others; None unless that was asked for."""
        return None if self._router is None or self.args.listen.address is None else self._router.address

    @property
    def restarts(self) -> int:
        return sum(supervisor.restarts for supervisor in self._supervisors)

    def replicas(self) -> list[list[RankStatus]]:
        """Status of every rank by replica, numbered on; none of a replica that is gone for good."""
        size = ranks_of_replica(self.args.run)
        return [
            [dataclasses.replace(rank, rank=index * size + rank.rank) for rank in supervisor.ranks()]
            for index, supervisor in enumerate(self._supervisors)
        ]

    def start(self) -> None:
        """Start all replicas at a time. Raises the first error; no process is left then."""
        errors: list[BaseException] = []

        def begin(supervisor: Supervisor) -> None:
            try:
                supervisor.start()
            except BaseException as error:
                # The border of the thread: the caller raises it.
                errors.append(error)

        threads = [threading.Thread(target=begin, args=(each,), daemon=True) for each in self._supervisors]
        try:
            for thread in threads:
                thread.start()
            while not errors and any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
            if errors:
                raise errors[0]
            self._open()
            self._thread.start()
        except BaseException:
            self.stop()
            raise

    def _open(self) -> None:
        """Let clients in; the replicas are there, or it is known why not."""
        self._router = Router(self.socket, self.args.listen, self._inbox)
        backends = {index: Backend(each.socket) for index, each in enumerate(self._supervisors)}
        self._relay = Relay(self.args, self._router, backends, lambda: self.restarts)

    def stop(self) -> None:
        """Tell clients, end all replicas, remove the folder. Repeatable."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.ident is not None:
            self._inbox.put(None)
            self._thread.join()
        stops = [threading.Thread(target=supervisor.stop) for supervisor in self._supervisors]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()
        self._inbox.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            while not self._stopped and self._turn():
                pass
        except BaseException as error:
            # The border of the thread: without it, those who wait would wait for ever.
            logger.exception("the controller failed")
            self._give_up(ServerError(f"the controller failed: {type(error).__name__}: {error}"))
        assert self._router is not None
        assert self._relay is not None
        self._router.close(Closing())
        for backend in self._relay.backends.values():
            backend.close()

    def _turn(self) -> bool:
        """Take what has come; False when told to stop, or no replica is left."""
        relay = self._relay
        assert relay is not None
        until = relay.tend()
        wait = None if until is None else int(1000 * until) + 1
        ready = Backend.wait(self._inbox, list(relay.backends.values()), wait)
        # Deaths before what replicas say: the next life's welcome may have come already.
        for item in self._inbox.take():
            if item is None:
                return False
            if not isinstance(item, _Died):
                self._early.append(item)
                continue
            relay.on_death(item.replica, item.suspects, item.reason)
            if item.reason is not None and not relay.backends:
                self._give_up(item.reason)
                return False
        for index, backend in list(relay.backends.items()):
            if backend in ready:
                for message, frames in backend.receive():
                    relay.from_replica(index, message, frames)
        while self._early and relay.ready:
            relay.from_client(*self._early.popleft())
        return True

    def _give_up(self, error: DiffgenError) -> None:
        assert self._relay is not None
        self.failure = error
        self._relay.fail_all(error)
        self._on_failure(error)
