"""One rank's life. The launcher forks it or, where it cannot, starts ``python -P -m diffgen.server.rank FD``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from diffgen.args import ModelArgs
from diffgen.errors import DiffgenError, StartFailed, WorkerDied
from diffgen.logs import set_up_logs
from diffgen.server.pipe import TO_RANK, Heartbeat, Pipe, RankError, Ready, Start, ToRank

if TYPE_CHECKING:
    from diffgen.worker.worker import GPUWorker, Progress

logger = logging.getLogger("diffgen.rank")

PARENT_CHECK_S = 1.0
_MOST_TEXT = 20_000  # of an error: a pipe takes a message of a mebibyte


def run(descriptor: int) -> NoReturn:
    """A rank's life, with this end of its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    parent = os.getppid()
    pipe = Pipe(Connection(descriptor), TO_RANK)
    try:
        start = pipe.receive()
    except EOFError:
        _exit(1)
    assert isinstance(start, Start)
    name_process(f"diffgen-rank{start.rank}")
    set_up_logs(start.args.run.log_level, start.args.run.log_format, f"rank {start.rank}")
    quieten(start.args.run.log_level)
    stops: queue.SimpleQueue[Any] = queue.SimpleQueue()
    watch = _Watch(pipe, start, parent, stops)
    # A rank without one of its threads would keep its clients waiting.
    threading.excepthook = lambda failed: _fail(pipe, failed.exc_value or RuntimeError("in a thread"), watch.started)
    try:
        _serve(start, pipe, watch, stops)
    except BaseException as error:
        # The border of the process: the parent must learn the reason before it sees the pipe close.
        _fail(pipe, error, watch.started)
    _exit(0)


def name_process(name: str) -> None:
    """As lists of processes show it: at most 15 characters, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def quieten(log_level: str) -> None:
    """Keep libraries from printing advice for people who write their programs; before they are imported."""
    if log_level in ("warning", "error"):
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # It says at import that some processors want torchvision, which nothing here uses.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)


def _fail(pipe: Pipe[ToRank], error: BaseException, started: bool) -> NoReturn:
    pipe.send(RankError(_as_diffgen_error(error, started).info().shortened(_MOST_TEXT)))
    # What keeps it from starting is mostly the model's fault or the machine's, and told in a line.
    level = logging.ERROR if started and not isinstance(error, DiffgenError) else logging.DEBUG
    logger.log(level, "the rank ends", exc_info=error)
    _exit(1)


def _exit(code: int) -> NoReturn:
    # Threads of gloo and ZMQ may wait for peers that are gone; there is nothing left to clean up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _as_diffgen_error(error: BaseException, started: bool) -> DiffgenError:
    if isinstance(error, DiffgenError):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1]
    kind = WorkerDied if started else StartFailed
    return kind(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")


class _Watch:
    """Threads that tell the parent that this rank lives, and end it when the parent does not."""

    def __init__(self, pipe: Pipe[ToRank], start: Start, parent: int, stops: queue.SimpleQueue[Any]) -> None:
        self.progress: Progress | None = None
        self._pipe, self._folder, self._parent, self._stops = pipe, start.run_folder, parent, stops
        threading.Thread(target=self._listen, name="pipe", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def started(self) -> bool:
        return self.progress is not None

    def _listen(self) -> None:
        try:
            while True:
                self._stops.put(self._pipe.receive())
        except EOFError:
            self._abandon()

    def _beat(self) -> None:
        while True:
            time.sleep(PARENT_CHECK_S)
            # Without the launcher nobody learns how this process ends; it is also how a rank sees that the supervisor
            # has gone while another process holds its end of the pipe.
            if os.getppid() != self._parent:
                _exit(1)
            if self.progress is not None:
                self._pipe.send(Heartbeat(**dataclasses.asdict(self.progress)))

    def _abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        _exit(1)


def _serve(start: Start, pipe: Pipe[ToRank], watch: _Watch, stops: queue.SimpleQueue[Any]) -> None:
    """Load, say ready, then lead or follow until told to stop."""
    args = start.args
    import torch

    from diffgen.distributed.groups import RankInfo, join
    from diffgen.distributed.layout import make_layout, may_share_memory
    from diffgen.loading.device import choose_device
    from diffgen.worker.executor import ParallelExecutor
    from diffgen.worker.faults import Faults
    from diffgen.worker.worker import GPUWorker

    info = RankInfo(start.rank, args.run.num_gpus)
    device = choose_device(args.run, info, start.place.first, start.place.others)
    if args.run.attention_backend == "xfuser":
        from diffgen.distributed.xfuser import check_xfuser

        check_xfuser(device)
    shares_memory = may_share_memory(device)
    control = join(info, Path(start.run_folder) / f"rendezvous-{start.restarts}", None if shares_memory else device)
    faults = Faults.from_environment(info.rank, Path(start.run_folder))
    faults.at("load")
    folder = _find_model(start, control, device)

    def arrange(abilities: Any, name: str) -> Any:
        from diffgen.distributed.dims import choose_dims

        # As the user has asked for it: what is refused is told in numbers of all replicas.
        replicas = 1 + start.place.others // info.size
        run = msgspec.structs.replace(args.run, num_gpus=info.size * replicas, dp_size=replicas)
        dims, why = choose_dims(run, abilities, name)
        logger.info("layout: %s (%s)", dims, why)
        shared = control if shares_memory else None
        return make_layout(dims, info, device, args.run.parallel_decode, args.run.attention_backend, shared)

    pipeline = open_pipeline(folder, args.model, device, arrange)
    faults.install(pipeline.stages)
    executor = ParallelExecutor(device, pipeline.layout)
    worker = GPUWorker(pipeline, executor, control, lambda error: _fail(pipe, error, True))
    watch.progress = worker.progress
    control.gather_vote([info.rank])  # no rank is ready before all have loaded
    logger.info("ready: %s on %s with %d threads", pipeline.spec.name, device, torch.get_num_threads())
    if info.leads:
        from diffgen.distributed.layout import empty_layout
        from diffgen.server.leader import Leader, make_scheduler

        def open_empty(model: ModelArgs) -> Any:
            layout = empty_layout(executor.layout.dims, args.run.parallel_decode)
            return open_pipeline(folder, model, torch.device("meta"), lambda abilities, name: layout)

        scheduler = make_scheduler(start, worker, open_empty)
        Leader(start, worker, scheduler, faults, pipe, stops).run()
    else:
        pipe.send(Ready(pipeline.spec.name))
        _follow(worker)


def _find_model(start: Start, control: Any, device: Any) -> Path:
    """The folder of the model. Raises :class:`StartFailed` where there is no memory for its weights."""
    from diffgen.loading.hub import resolve_model
    from diffgen.loading.memory import check_weights

    folder = ""
    # One rank downloads; the others are told where to.
    if control.info.leads:
        found = resolve_model(start.args.model)
        # The other replicas load now, too; when this one starts again they have loaded.
        ranks = control.info.size + (0 if start.restarts else start.place.others)
        check_weights(found, start.args.model, device, ranks, start.args.run.tp_size or 1)
        folder = str(found)
    return Path(control.broadcast(folder.encode()).decode())


def open_pipeline(folder: Path, model: ModelArgs, device: Any, arrange: Any = None) -> Any:
    """The pipeline of a model's folder on ``device``; on "meta" without weights, to learn what it takes.

    ``arrange(abilities, name)`` gives the layout for a model that can be split so; one rank without it.
    """
    # The one import upwards: a rank is where the three packages meet.
    import pipelines

    ours = Path(__file__).resolve().parents[2] / "pipelines" / "__init__.py"
    found = Path(pipelines.__file__ or "").resolve()
    if found != ours:
        raise StartFailed(f"Python finds another package 'pipelines' at {found.parent}; take it off PYTHONPATH")
    quieten("info")
    from pipelines.registry import load_pipeline

    return load_pipeline(folder, model, device, arrange)


def _follow(worker: GPUWorker) -> None:
    from diffgen.scheduler.plan import Plan

    decoder = msgspec.msgpack.Decoder(Plan)
    while not (plan := decoder.decode(worker.control.broadcast())).stop:
        worker.tick(plan)


if __name__ == "__main__":
    run(int(sys.argv[1]))
