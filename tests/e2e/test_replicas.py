"""Several replicas behind one address."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import mixed
import psutil
import pytest
from oracle import level_difference
from processes import wait_until

from diffgen import DiffGenerator
from diffgen.errors import InvalidRequest, RequestCancelled, StartFailed
from diffgen.http.health import troubles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

FAST: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "seed": 1}


def test_two_replicas(
    tiny_wan: Path, root: Path, tiny_generator: DiffGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are shared out and make the pixels of one rank, also those of a replica that dies; a request that has no
    part in the death moves to the other at once. Status and abort speak for both, and each has two ranks."""
    monkeypatch.setenv("DIFFGEN_FAULT", mixed.faults(rank=1))
    expected, alone = tiny_generator.generate("a", **FAST).pixels, mixed.draw(tiny_generator)
    options: dict[str, Any] = {"num_gpus": 4, "tp_size": 2, "dp_size": 2, "dp_policy": "round_robin"}
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", log_level="error", **options) as generator:
        assert [rank.rank for rank in generator.ranks()] == [0, 1, 2, 3]
        for handle in [generator.submit("a", **FAST) for _ in range(4)]:
            assert level_difference(handle.result(60).pixels, expected) <= 1
        wait_until(lambda: steps(generator) == [4] * 4, 10, "each replica has had two of the four")
        status = generator.status()
        assert status.finished == {"done": 4}
        assert status.units["denoise"] == 8
        first, second = (mixed.running(generator) for _ in range(2))
        assert {each.id for each in generator.status().requests} == {first.id, second.id}
        with DiffGenerator.connect(generator.address) as other:
            assert other.abort(second.id)
            assert not other.abort(second.id)
            with pytest.raises(RequestCancelled, match="aborted by another client"):
                second.result(60)
        first.cancel()
        with pytest.raises(RequestCancelled):
            first.result(60)
        mixed.check_batches(generator, alone)
        mixed.check_failures(generator, 1, alone)
        mixed.check_agreement(generator, replicas=2)
        _kill_one(generator, expected)


def steps(generator: DiffGenerator) -> list[int]:
    """How many each rank says that it has run."""
    return [rank.heartbeat.units["denoise"] for rank in generator.ranks() if rank.heartbeat is not None]


def _kill_one(generator: DiffGenerator, expected: Any) -> None:
    """Of four requests, those of the dead replica's last tick wait for its next life, the others do not."""
    restarts = generator.status().restarts
    handles = [mixed.running(generator, num_inference_steps=200) for _ in range(2)]
    waiting = [generator.submit("a", **FAST) for _ in range(4)]
    assert generator.supervisor is not None
    replicas = generator.supervisor.replicas
    os.kill(generator.ranks()[0].pid, signal.SIGKILL)
    # What /health goes by: one replica serves while the other is being started again.
    down = "ranks [0, 1] are being started again"
    wait_until(lambda: troubles(replicas()) == [down, None], 10, "the other is up")
    for handle in waiting:
        assert level_difference(handle.result(60).pixels, expected) <= 1
    for handle in handles:
        assert handle.result(120).pixels.shape == expected.shape
    wait_until(lambda: troubles(replicas()) == [None, None], 60, "both replicas")
    assert generator.status().restarts == restarts + 1


def test_one_that_cannot_start_ends_all(tiny_wan: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has a rank 1; a fault is counted in the folder of its own replica."""
    monkeypatch.setenv("DIFFGEN_FAULT", "raise@load:0:0")
    with pytest.raises(StartFailed, match="rank 0: RuntimeError: fault on purpose"):
        DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", num_gpus=2, dp_size=2, log_level="error")


def test_a_layout_is_refused_in_numbers_of_all_replicas(tiny_wan: Path, root: Path) -> None:
    nearest = "do not divide by tp_size 3 .*; nearest: num_gpus 4 with dp_size 2 x tp_size 2 alone"
    with pytest.raises(InvalidRequest, match=nearest):
        DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", num_gpus=6, dp_size=2, tp_size=3, log_level="error")


def test_memory_is_that_of_all_replicas(tiny_wan: Path, tmp_path: Path, root: Path) -> None:
    """Weights that fit once are refused twice, before anything is loaded."""
    folder = shutil.copytree(tiny_wan, tmp_path / "large")
    size = int(0.7 * psutil.virtual_memory().available) // 4 * 4
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    head = json.dumps({"weights": tensor}).encode()
    with (folder / "transformer" / "large.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)  # a hole, which takes no room
    with pytest.raises(StartFailed, match=r"weights of .* and each of 2 rank\(s\) on cpu has") as caught:
        DiffGenerator.from_pretrained(str(folder), device="cpu", num_gpus=2, dp_size=2, log_level="error")
    assert caught.value.code == "insufficient_memory"
