"""Start, end and death of the processes, as seen from outside."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mixed
import numpy as np
import psutil
import pytest
import zmq
from oracle import level_difference
from processes import leftovers, rank_processes, read_line, run_root, script, shared_memory, wait_until
from proxy import Proxy
from raw_client import Raw

from diffgen import DiffGenerator
from diffgen.errors import (
    DeadlineExceeded,
    DiffgenError,
    GenerationError,
    NanOutput,
    OutOfMemory,
    RanksDiverged,
    RequestCancelled,
    ServerClosed,
    StartFailed,
    WorkerDied,
)
from diffgen.handle import GenerationHandle
from diffgen.params import Limits, SamplingParams
from diffgen.server.outbox import WRITE_S
from diffgen.wire.messages import Cancel, Failed, Progress, Received, Restarting, Result, Submit, Welcome

FAST = {"num_inference_steps": 4, "width": 64, "height": 64, "num_frames": 1}
LONG = {**FAST, "num_inference_steps": 900}
TOKEN = "sesame"
GRACE_S = 4

USER = """
import sys, threading
from diffgen import DiffGenerator
model, num_gpus, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
print("starting", flush=True)
generator = DiffGenerator.from_pretrained(model, num_gpus=num_gpus, device="cpu", log_level="error")
print("ready", flush=True)
if mode == "denoise":
    handle = generator.submit("a", num_inference_steps=900, width=64, height=64, num_frames=1)
    for event in handle.events():
        if getattr(event, "stage", "") == "denoise":
            print("denoising", flush=True)
            break
threading.Event().wait()
"""


@pytest.fixture
def _shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert shared_memory() <= before


@pytest.fixture
def root(_shared_memory: None, root: Path) -> Path:
    """No shared memory is left either, once all processes have gone."""
    return root


@pytest.mark.slow
@pytest.mark.parametrize("when", ["load", "idle", "denoise"])
def test_kill_9_of_the_parent_leaves_nothing(tiny_wan: Path, root: Path, when: str) -> None:
    with script(USER, root, str(tiny_wan), "2", when) as process:
        read_line(process, "starting")
        wait_until(lambda: len(rank_processes(root)) == 2, 150, "both ranks run")
        if when != "load":
            read_line(process, "ready")
        if when == "denoise":
            read_line(process, "denoising")
        process.kill()
        process.wait()
        wait_until(lambda: not leftovers(root), 5, "ranks, sockets and folder are gone")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "when"), [(signal.SIGTERM, "denoise"), (signal.SIGINT, "idle")])
def test_signals_to_the_parent_leave_nothing(tiny_wan: Path, root: Path, number: signal.Signals, when: str) -> None:
    with script(USER, root, str(tiny_wan), "2", when) as process:
        read_line(process, "ready")
        if when == "denoise":
            read_line(process, "denoising")
        process.send_signal(number)
        assert process.wait(10) != 0
        wait_until(lambda: not leftovers(root), 5, "ranks, sockets and folder are gone")


def test_a_child_forked_by_the_user_does_not_keep_the_ranks(tiny_wan: Path, root: Path) -> None:
    """The child holds the parent's end of the pipes, so their end is not seen; the ranks look at their parent too."""
    text = USER.replace(
        'print("ready"', 'import os, time\nif os.fork() == 0: time.sleep(20); os._exit(0)\nprint("ready"'
    )
    with script(text, root, str(tiny_wan), "1", "idle") as process:
        read_line(process, "ready")
        children = [
            child for child in psutil.Process(process.pid).children() if "script.py" in " ".join(child.cmdline())
        ]
        process.kill()
        process.wait()
        wait_until(lambda: not leftovers(root), 5, "ranks, sockets and folder are gone")
        for child in children:
            child.kill()


def _in_denoising(generator: DiffGenerator, prompt: str, **sampling: Any) -> GenerationHandle:
    """A request that is being denoised."""
    handle = generator.submit(prompt, **sampling)
    for event in handle.events():
        if isinstance(event, Progress) and event.stage == "denoise":
            break
    return handle


STATES, VICTIMS = ("load", "encode", "denoise", "decode", "send"), ("rank 0", "rank 1", "launcher")


def _hang(when: str, victim: str) -> str:
    """The fault that keeps the ranks in a state until the victim is killed."""
    return f"hang@{'denoise' if when == 'load' else when}:0:0:1:{when} {victim}"


@pytest.fixture(scope="module")
def mortal(tiny_wan: Path) -> Iterator[tuple[DiffGenerator, Path]]:
    """Two ranks that hang in every state, each time once, and their TMPDIR."""
    with run_root() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        patch.setenv("DIFFGEN_FAULT", ";".join(_hang(when, victim) for when in STATES for victim in VICTIMS))
        options: dict[str, Any] = {"num_gpus": 2, "max_restarts": 99, "max_running": 1, "log_level": "error"}
        with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", **options) as generator:
            yield generator, folder
        assert leftovers(folder) == []


def _kill(generator: DiffGenerator, victim: str) -> None:
    """Once all ranks are there."""
    wait_until(lambda: all(rank.pid for rank in generator.ranks()), 30, "the ranks are forked")
    pids = [rank.pid for rank in generator.ranks()]
    os.kill(psutil.Process(pids[0]).ppid() if victim == "launcher" else pids[int(victim[-1])], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("when", STATES)
def test_whatever_is_killed_whenever_no_request_is_lost(
    mortal: tuple[DiffGenerator, Path], when: str, victim: str
) -> None:
    """By SIGKILL, while the ranks are loaded once more, or are in a unit, or send: what ran and what waited in the
    queue is told so, and runs again to the same pixels."""
    generator, root = mortal
    expected, address = generator.generate("a", seed=1, **FAST), generator.address
    restarts = generator.status().restarts
    running = generator.submit(f"{when} {victim}", seed=1, **FAST)
    queued = generator.submit("a", seed=1, **FAST)
    mark = f"diffgen-*/fault-{_hang(when, victim).encode().hex()[:200]}"
    wait_until(lambda: list(root.glob(mark)), 30, "rank 0 hangs")
    with DiffGenerator.connect(address, timeout=10) as other:  # which no unit holds up
        assert running.id in {each.id for each in other.status(timeout=10).requests}
    old = [rank.pid for rank in generator.ranks()]
    began = time.monotonic()
    _kill(generator, "rank 0" if when == "load" else victim)
    for handle in (running, queued):
        next(event for event in handle.events() if isinstance(event, Restarting))
    assert time.monotonic() - began < 20, "ten times the bar of 2 s"
    if when == "load":
        wait_until(lambda: not {rank.pid for rank in generator.ranks()} & set(old), 30, "there are new ranks")
        assert not all(rank.ready for rank in generator.ranks())
        _kill(generator, victim)
    # The two may have shared steps.
    assert level_difference(queued.result(timeout=100).pixels, expected.pixels) <= 1
    again = generator.generate(f"{when} {victim}", seed=1, **FAST)
    assert level_difference(running.result(timeout=100).pixels, again.pixels) <= 1
    assert generator.address == address
    assert generator.status().restarts == restarts + (2 if when == "load" else 1)


@pytest.mark.slow
def test_a_run_folder_that_was_cleaned_away_is_made_again(tiny_wan: Path, root: Path) -> None:
    """Some systems remove from the folder for temporary files what is old. The next life needs it."""
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", log_level="error") as generator:
        expected = generator.generate("a", seed=1, **FAST)
        (folder,) = root.glob("diffgen-*")
        shutil.rmtree(folder)
        os.kill(generator.ranks()[0].pid, signal.SIGKILL)
        assert np.array_equal(generator.generate("a", seed=1, timeout=60, **FAST).pixels, expected.pixels)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["poison", "hang", "late"])
def test_a_request_that_kills_the_server_twice_is_refused(
    tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    """Also one whose result rank 0 cannot copy. Its company in the same batch runs on, both times; the address of
    clients from outside stays."""
    monkeypatch.setenv("DIFFGEN_FAULT", "exit@denoise:1:0:*:poison;hang@denoise:1:0:*:hang;hang@send:0:0:*:late")
    with DiffGenerator.from_pretrained(
        str(tiny_wan),
        device="cpu",
        log_level="error",
        unit_timeout=4,
        address="tcp://127.0.0.1:*",
        token="sesame",
    ) as generator:
        expected = generator.generate("a", seed=1, **FAST)
        with DiffGenerator.connect(generator.address, token="sesame") as outside:
            company = [generator.submit("a", seed=1, **FAST), outside.submit("a", seed=1, **FAST)]
            culprit = generator.submit(prompt, seed=1, **FAST)
            with pytest.raises(WorkerDied, match="died 2 times") as caught:
                culprit.result(timeout=100)
            assert not caught.value.retryable
            for handle in company:
                assert level_difference(handle.result(timeout=60).pixels, expected.pixels) <= 1
            assert sum(isinstance(event, Restarting) for event in culprit.events()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["skip", "hang"])
def test_a_rank_that_others_wait_for_is_named(
    tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One that skips a collective of a process group has voted, and it is the other that never ends."""
    monkeypatch.setenv("DIFFGEN_COLLECTIVES", "gloo" if kind == "skip" else "shared")
    monkeypatch.setenv("DIFFGEN_FAULT", f"{kind}@denoise:1:1:*:bad ")
    options: dict[str, Any] = {"num_gpus": 2, "unit_timeout": 5, "max_restarts": 0, "log_level": "error"}
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", **options) as generator:
        late = r"ranks \[0\] .* after 5 s, and ranks \[1\] wait" if kind == "skip" else r"ranks \[0, 1\] .* after 5 s"
        with pytest.raises(WorkerDied, match=late):
            generator.generate("bad ", seed=1, timeout=60, **FAST)


@pytest.mark.slow
def test_a_server_that_may_not_restart_says_why_it_ended(tiny_wan: Path, root: Path) -> None:
    generator = DiffGenerator.from_pretrained(str(tiny_wan), num_gpus=2, device="cpu", max_restarts=0)
    try:
        handles = [_in_denoising(generator, "a", seed=1, **LONG), generator.submit("a", seed=1, **LONG)]
        os.kill(generator.ranks()[1].pid, signal.SIGKILL)
        began = time.monotonic()
        for handle in handles:
            with pytest.raises(WorkerDied, match=r"given up after 1 failure.*rank 1 .*SIGKILL"):
                handle.result(timeout=20)
        assert time.monotonic() - began < 20, "ten times the bar of 2 s"
        with pytest.raises(WorkerDied):
            generator.generate("a", **FAST)
        assert leftovers(root) == []
    finally:
        generator.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("raise", "rank 1: RuntimeError: fault on purpose"),
        ("exit", r"rank 1 \(pid \d+\) ended with exit code 9"),
    ],
)
def test_a_rank_that_cannot_start_ends_all(
    tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, match: str
) -> None:
    monkeypatch.setenv("DIFFGEN_FAULT", f"{kind}@load:0:1")
    with pytest.raises(StartFailed, match=match):
        DiffGenerator.from_pretrained(str(tiny_wan), num_gpus=2, device="cpu", log_level="error")
    assert leftovers(root) == []


@pytest.mark.parametrize(
    ("where", "options"),
    [("load", {}), pytest.param("denoise", {"warmup": "64x64"}, marks=pytest.mark.slow)],
)
def test_start_has_a_time_limit(
    tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch, where: str, options: dict[str, Any]
) -> None:
    """Warming up included."""
    monkeypatch.setenv("DIFFGEN_FAULT", f"hang@{where}:0:0")
    with pytest.raises(StartFailed, match=r"ranks \[0\] were not ready after 8 s"):
        DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", start_timeout=8, **options)
    assert leftovers(root) == []


# What strikes, by the first word of the prompts: the kind and where, and the error that the request ends with.
FAULTS: dict[str, tuple[str, type[DiffgenError], str]] = {
    "raises": ("raise@forward:1", GenerationError, "denoise failed: RuntimeError: fault on purpose"),
    "fills": ("oom@forward:2", OutOfMemory, "out of memory in denoise"),
    "fills-late": ("oom@decode:0", OutOfMemory, "out of memory in decode"),
    "stays": ("raise@send:0", GenerationError, "send failed: RuntimeError: fault on purpose"),
    "odd-text": ("nan@encode:0", NanOutput, "encode: .* values of encoder_hidden_states"),
    "odd-latents": ("nan@denoise:1", NanOutput, "denoise: .* latents"),
    "odd-frames": ("nan@decode:0", NanOutput, "decode: .* decoded pixels"),
    "differs": ("differ@denoise:1", RanksDiverged, r"ranks \[1\]"),
    "differing-text": ("differ@encode:0", RanksDiverged, r"ranks \[1\]"),
    "differing-noise": ("differ@latents:0", RanksDiverged, r"ranks \[1\]"),
    "differing-frames": ("differ@decode:0", RanksDiverged, r"ranks \[1\]"),
    "skips": ("skip@decode:0", RanksDiverged, r"ranks \[1\]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_failures_on_one_rank_are_answered_and_pass(
    tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Each ends its request with that rank's reason; its company and all later ones go on with the same pixels."""
    last = ranks - 1
    # A rank alone does not diverge, and only rank 0 sends.
    cases = {
        name: (where, error, match)
        for name, (where, error, match) in FAULTS.items()
        if ("@send" not in where if last else error is not RanksDiverged)
    }
    faults = [f"{where}:{last}:*:{name} " for name, (where, _, _) in cases.items()]
    monkeypatch.setenv("DIFFGEN_FAULT", ";".join([*faults, f"raise@forward:1:{last}:1:once "]))
    options: dict[str, Any] = {"num_gpus": ranks, "parallel_decode": False, "log_level": "error"}
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", **options) as generator:
        good = generator.generate("a", seed=1, **FAST)
        for name, (_, error, match) in cases.items():
            company = generator.submit("a", seed=1, **FAST)
            bad = generator.submit(f"{name} ", seed=1, **FAST)
            with pytest.raises(error, match=match if ranks == 1 or error is RanksDiverged else rf"rank \d: {match}"):
                bad.result(timeout=60)
            assert level_difference(company.result(timeout=60).pixels, good.pixels) <= 1
        leader = psutil.Process(generator.ranks()[0].pid)
        leader.suspend()  # so that both are there when it goes on, and share steps: of a new size, that is always tried
        passing = [generator.submit(prompt, seed=1, **{**FAST, "width": 96}) for prompt in ("once ", "a")]
        time.sleep(0.3)
        leader.resume()
        for handle in passing:
            handle.result(timeout=60)
        again = generator.generate("a", seed=1, timeout=60, **FAST)
        assert np.array_equal(again.pixels, good.pixels)
        mixed.check_agreement(generator)
    with pytest.raises(ServerClosed):
        generator.generate("a")
    generator.close()


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["shared", "gloo"])
def test_a_rank_that_leaves_others_waiting_ends_its_request_alone(
    tiny_wan: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    collectives: str,
) -> None:
    """The request has the rank's error. In process groups nobody hears of it: that costs a restart, which does not
    count as one of the server's failures. Through shared memory it costs nothing, nor does a collective left out."""
    monkeypatch.setenv("DIFFGEN_COLLECTIVES", collectives)
    monkeypatch.setenv("DIFFGEN_FAULT", "raise@decode:0:1:*:leaves ;skip@denoise:1:1:*:skips ")
    options: dict[str, Any] = {"num_gpus": 2, "max_restarts": 0, "log_level": "error"}
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", **options) as generator:
        good = generator.generate("a", seed=1, **FAST)
        leaving, company = (generator.submit(prompt, seed=1, **FAST) for prompt in ("leaves ", "a"))
        with pytest.raises(GenerationError, match="rank 1: decode failed: RuntimeError: fault on purpose"):
            leaving.result(timeout=120)
        assert level_difference(company.result(timeout=60).pixels, good.pixels) <= 1
        if collectives == "shared":
            with pytest.raises(RanksDiverged, match="rank 0: denoise: rank 1 does not take part"):
                generator.generate("skips ", seed=1, timeout=60, **FAST)
            assert np.array_equal(generator.generate("a", seed=1, **FAST).pixels, good.pixels)
        assert generator.status().restarts == (collectives == "gloo")
    assert caplog.text.count("started again: rank 1: decode failed") == (collectives == "gloo")
    assert leftovers(root) == []


@pytest.fixture(scope="module")
def listening(tiny_wan: Path) -> Iterator[DiffGenerator]:
    """One rank that listens on TCP too, and waits for clients that have gone for ``GRACE_S``."""
    with run_root() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        options: dict[str, Any] = {"address": "tcp://127.0.0.1:*", "token": TOKEN, "limits": Limits(grace=GRACE_S)}
        with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", log_level="error", **options) as generator:
            yield generator


def test_one_rank(listening: DiffGenerator) -> None:
    """A time limit ends what runs; an idle rank sleeps; its command line and environment hold no secret."""
    with pytest.raises(DeadlineExceeded, match="its time_limit of 1 s is over") as late:
        listening.generate("a", time_limit=1.0, **{**FAST, "num_inference_steps": 900})
    assert late.value.code == "deadline_exceeded"
    listening.generate("a", **FAST)
    with pytest.raises(DeadlineExceeded, match="takes about") as impossible:
        listening.generate("a", time_limit=0.01, **{**FAST, "num_inference_steps": 900})
    assert impossible.value.code == "deadline_impossible"
    status = listening.status()
    assert (status.running, status.queued, status.restarts) == (0, 0, 0)
    assert {"deadline_exceeded", "done"} <= status.finished.keys()
    assert status.refused == {"deadline_impossible": 1}
    assert listening.address is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.plain_username, stranger.plain_password = b"diffgen", TOKEN.encode()
        stranger.connect(listening.address)
        stranger.send(b"what?")
        wait_until(lambda: listening.status().malformed == 1, 10, "what cannot be read is counted")
    process = psutil.Process(listening.ranks()[0].pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(3)
    assert sum(process.cpu_times()[:2]) - before < 0.3, "ten times the bar of 1 % of a core"
    assert process.cmdline()[:4] == [sys.executable, "-P", "-m", "diffgen.server.launcher"]
    assert process.name() == "diffgen-rank0"
    assert TOKEN not in " ".join([*process.cmdline(), *process.environ().values()])


CLIENT = """
import sys, threading
from diffgen import DiffGenerator
generator = DiffGenerator.connect(sys.argv[1], token=sys.argv[2])
# So large that it cannot be done before the grace is over, however fast the machine is.
handle = generator.submit("a", num_inference_steps=900, width=384, height=384, num_frames=1)
print("id", handle.id, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_clients_that_vanish_and_come_back(listening: DiffGenerator, root: Path) -> None:
    """A client that is killed has its request cancelled after the grace. One that loses its connection meanwhile gets,
    when it is back, the result that was made and the failure that was found while it was away; nothing runs again."""
    assert listening.address is not None

    def finished(outcome: str) -> int:
        return listening.status().finished.get(outcome, 0)

    case: dict[str, Any] = {**FAST, "num_inference_steps": 200, "seed": 1}
    expected = listening.generate("a", **case).pixels
    with script(CLIENT, root, listening.address, TOKEN) as client:
        killed = read_line(client, "id")
        wait_until(lambda: killed in {each.id for each in listening.status().requests}, 10, "it is in work")
        client.kill()
        since = time.monotonic()
    done, cancelled = finished("done"), finished("request_cancelled")
    with Proxy(listening.address) as proxy, DiffGenerator.connect(proxy.address, token=TOKEN) as outside:
        lost = [_in_denoising(outside, "a", **kind) for kind in (LONG, case)]
        proxy.cut()
        assert listening.abort(lost[0].id)
        wait_until(lambda: finished("done") == done + 1, 20, "its result is made")
        units = listening.status().units["decode"]
        proxy.mend()
        # It may have shared steps with the other one.
        assert level_difference(lost[1].result(timeout=20).pixels, expected) <= 1
        with pytest.raises(RequestCancelled, match="aborted by another client"):
            lost[0].result(timeout=20)
        assert all(any(isinstance(event, Restarting) for event in handle.events()) for handle in lost)
        assert listening.status().units["decode"] == units
    gone = time.monotonic() - since
    if gone < GRACE_S:
        assert killed in {each.id for each in listening.status().requests}, "the grace is not over"
    wait_until(lambda: finished("request_cancelled") == cancelled + 2, GRACE_S + 10, "its request is cancelled")
    assert not listening.status().requests


@pytest.mark.slow
def test_results_outlive_the_ranks(listening: DiffGenerator) -> None:
    """A result and a failure of a client that is away are there when rank 0 has been killed meanwhile."""
    assert listening.address is not None
    case: dict[str, Any] = {**FAST, "num_inference_steps": 200}
    expected = listening.generate("a", seed=1, **case).pixels
    restarts, ends = listening.status().restarts, sum(listening.status().finished.values())
    with Proxy(listening.address) as proxy, DiffGenerator.connect(proxy.address, token=TOKEN) as outside:
        done, aborted = (_in_denoising(outside, "a", seed=1, **kind) for kind in (case, LONG))
        proxy.cut()
        assert listening.abort(aborted.id)
        wait_until(lambda: sum(listening.status().finished.values()) == ends + 2, 20, "both have ended")
        time.sleep(2 * WRITE_S)
        os.kill(listening.ranks()[0].pid, signal.SIGKILL)
        wait_until(lambda: listening.ranks()[0].ready is None, 5, "rank 0 is dead")
        listening.generate("a", seed=1, **FAST)  # by the next rank 0
        units = listening.status().units["decode"]
        proxy.mend()
        # It may have shared steps with the other one.
        assert level_difference(done.result(timeout=20).pixels, expected) <= 1
        with pytest.raises(RequestCancelled, match="aborted by another client"):
            aborted.result(timeout=20)
        status = listening.status()
        assert status.restarts == restarts + 1
        assert status.units["decode"] == units, "neither ran again"


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_ended(listening: DiffGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the system has stopped, which closes no pipe and is in no unit."""
    expected, restarts = listening.generate("a", seed=1, **FAST).pixels, listening.status().restarts
    monkeypatch.setattr("diffgen.server.replica.SILENCE_S", 4.0)
    psutil.Process(listening.ranks()[0].pid).suspend()
    assert np.array_equal(listening.generate("a", seed=1, timeout=60, **FAST).pixels, expected)
    assert listening.status().restarts == restarts + 1


@pytest.mark.slow
def test_cancel_while_the_result_is_on_its_way(listening: DiffGenerator) -> None:
    """A client that does not read has its result stuck in the server. Its cancel, told twice, runs nothing and takes no
    other's answer; the result, which nobody can call back, stays the only answer, and is not kept: asked for once more,
    the request has been cancelled."""
    assert listening.address is not None
    sizes = {"width": 256, "height": 256, "num_frames": 1, "num_outputs_per_prompt": 16}
    asked = Submit("sending", SamplingParams(prompt="a", num_inference_steps=1, guidance_scale=1.0, seed=1, **sizes))
    good = listening.generate("a", seed=1, **FAST).pixels
    before = listening.status()
    # The result is twice what the sockets take unread.
    with Raw(listening.address, TOKEN, {zmq.RCVHWM: 1, zmq.RCVBUF: 4096}) as client:
        assert isinstance(client.hello(), Welcome)
        client.tell(asked)
        wait_until(lambda: listening.status(60).finished["done"] == before.finished["done"] + 1, 60, "it is made")
        for _ in range(2):
            client.tell(Cancel("sending"))
        assert np.array_equal(listening.generate("a", seed=1, timeout=60, **FAST).pixels, good)
        answers = [client.answer(30)]
        while not isinstance(answers[-1], Result | Failed | None):
            answers.append(client.answer(30))
        assert isinstance(answers[-1], Result)
        assert len(client.tensors[0]) == 16 * 256 * 256 * 3
        assert client.answer(1) is None
        client.tell(asked)
        again = client.answer()
        assert isinstance(again, Failed)
        assert again.error.code == "request_cancelled"
        client.tell(Received("sending"))
    after = listening.status()
    assert after.finished == {**before.finished, "done": before.finished["done"] + 2}, "both were made, once"
    assert after.malformed == before.malformed


def test_a_generator_left_open_is_closed_at_exit(tiny_wan: Path, root: Path) -> None:
    text = 'import sys\nfrom diffgen import DiffGenerator\nDiffGenerator.from_pretrained(sys.argv[1])\nprint("end")\n'
    with script(text, root, str(tiny_wan)) as process:
        assert process.wait(60) == 0
    assert leftovers(root) == []
