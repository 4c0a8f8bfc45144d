"""Memory, descriptors and threads after many requests of every fate."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import psutil
import pytest
import tiny_models
import zmq

from diffgen import DiffGenerator
from diffgen.errors import DiffgenError, InvalidRequest, NanOutput, RequestCancelled
from diffgen.handle import GenerationHandle
from diffgen.params import parse_params
from diffgen.wire import codec
from diffgen.wire.messages import Accepted, Hello, Ping, ServerMessage, Submit, Welcome

EARLY, LATE, WINDOW = 200, 1000, 20
_DECODER = codec.server_message_decoder()
TINY = {"width": 32, "height": 32, "num_frames": 1, "num_inference_steps": 1}


def _abandon(address: str, seed: int) -> None:
    """A request of a client whose connection breaks without a word."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(codec.encode(Hello()))
        assert isinstance(_answer(socket), Welcome)
        params = parse_params({"prompt": "a", "seed": seed, **TINY})
        socket.send_multipart(codec.encode(Submit(uuid.uuid4().hex, params)))
        assert isinstance(_answer(socket), Accepted)


def _answer(socket: zmq.Socket[bytes]) -> ServerMessage:
    while isinstance(message := codec.decode(socket.recv_multipart()[:2], _DECODER), Ping):
        pass
    return message


def _send(generator: DiffGenerator, number: int) -> GenerationHandle | None:
    """Of nine requests one fails, one is refused or cancelled in turns, and one is abandoned."""
    case = {"seed": number, **TINY}
    if number % 9 == 0:
        return generator.submit("bad", **case)
    if number % 18 == 3:
        return generator.submit("a", **{**case, "width": 33})
    if number % 18 == 12:
        handle = generator.submit("a", **{**case, "num_inference_steps": 50})
        next(handle.events())
        handle.cancel()
        return handle
    if number % 9 == 6:
        _abandon(generator.address, number)
        return None
    return generator.submit(f"a {number}", **case)


def _held(processes: list[psutil.Process]) -> tuple[float, int, int]:
    """MB of memory, descriptors and threads of all. Memory is what no file can give back, of which each counts its
    part: what is of files depends on who else has them mapped, as the ranks of other tests have."""
    memory = 0
    for process in processes:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        memory += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return memory / 1024, sum(p.num_fds() for p in processes), sum(p.num_threads() for p in processes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFGEN_FAULT", "nan@decode:0:*:*:bad")
    model = tiny_models.make_tiny_wan(tmp_path / "model", layers=1)
    with DiffGenerator.from_pretrained(
        str(model), num_gpus=2, device="cpu", log_level="error", text_cache_mb=1
    ) as generator:
        ranks = [psutil.Process(rank.pid) for rank in generator.ranks()]
        processes = [psutil.Process(), psutil.Process(ranks[0].ppid()), *ranks]
        measured = []
        flying: list[GenerationHandle] = []
        kinds = dict.fromkeys((NanOutput, InvalidRequest, RequestCancelled), 0)
        for number in range(LATE):
            handle = _send(generator, number)
            flying += [] if handle is None else [handle]
            last = number + 1 in (EARLY, LATE)
            while len(flying) > (0 if last else WINDOW):
                try:
                    assert flying.pop(0).result(timeout=100).pixels.shape == (1, 1, 32, 32, 3)
                except DiffgenError as error:
                    kinds[type(error)] += 1
            if last:
                time.sleep(5)  # connections that have ended are seen within a few seconds
                assert generator.status().requests == ()
                measured.append(_held(processes))
        assert all(count > LATE / 20 for count in kinds.values()), kinds
        assert generator.status().restarts == 0
    for early, late in zip(*measured, strict=True):
        assert late <= 1.05 * early, measured
