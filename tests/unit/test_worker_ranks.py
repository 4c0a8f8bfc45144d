"""Two ranks that vote: one process each, as in a server, with a stage of a few lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_RANK = """
import json, sys
from pathlib import Path
import torch
from diffgen.distributed.groups import RankInfo, join
from diffgen.errors import RanksDiverged
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import Update
from diffgen.scheduler.plan import Admit, Plan
from diffgen.worker.executor import ParallelExecutor
from diffgen.worker.worker import GPUWorker

rank = int(sys.argv[1])
control = join(RankInfo(rank, 2), Path(sys.argv[2]), None)

class Stage:
    prepares = False
    stepped = False
    name = "stage"
    def units(self, req): return 2 + (rank if req.params.prompt == "more units" else 0)
    def batch_key(self, req): return "all"
    def run(self, reqs, ctx):
        for req in reqs:
            if rank == 1 and req.params.prompt.startswith("fail "):
                raise RuntimeError(req.params.prompt[5:])
        return [self.update(req.params.prompt) for req in reqs]
    def update(self, prompt):
        values = torch.arange(3.0)
        if rank == 1 and prompt == "not finite":
            values = values / 0
        if rank == 1 and prompt == "shape":
            values = values[None]
        frames = torch.full((1, 1, 2, 2, 3), rank if prompt == "frames" else 0, dtype=torch.uint8)
        return Update(latents=values + (rank if prompt == "diverge" else 0), frames=(frames,))

class Last(Stage):
    name = "last"
    def units(self, req): return int(rank == 0 and req.params.prompt == "ends early")

class Small:
    stages = [Stage(), Last()]
    spec = ModelSpec(name="m", family="f", defaults={}, size_multiple=1, frame_stride=0, guidance=None)

worker = GPUWorker(Small, ParallelExecutor(torch.device("cpu")), control)
report = {"ticks": [], "broadcasts": []}
for size in (0, 1, 4088, 4089, 100_000):
    data = bytes(index % 251 for index in range(size))
    report["broadcasts"].append(control.broadcast(data if rank == 0 else b"") == data)
for number, prompts in enumerate(json.loads(sys.argv[3])):
    ids = [f"{number}-{index}" for index in range(len(prompts))]
    admits = tuple(Admit(i, SamplingParams(prompt=p, seed=1), ()) for i, p in zip(ids, prompts))
    tick = number + (rank if prompts == ["another tick"] else 0)
    try:
        outcomes, _ = worker.tick(Plan(tick=tick, admit=admits, ids=tuple(ids)))
    except RanksDiverged as error:
        report["apart"] = error.message
        break
    for stage in (0, 1) if prompts == ["ends early"] else ():
        outcomes, _ = worker.tick(Plan(tick=number, stage=stage, ids=tuple(ids)))
    report["ticks"].append([
        [o.step, o.error and o.error.kind, o.error and o.error.message, worker._reqs[o.id].latents is None]
        for o in outcomes
    ])
report["fingerprint"], report["units"] = worker.progress.fingerprint, worker.progress.units
print(json.dumps(report))
"""


def _run(tmp_path: Path, ticks: list[list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each tick admits a request a prompt and runs one unit of all; returns both ranks' reports."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _RANK, str(rank), str(tmp_path / "rendezvous"), json.dumps(ticks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(text for _, text in outputs)
    first, second = (json.loads(text) for text, _ in outputs)
    return first, second


@pytest.mark.slow
def test_ranks_vote_commit_and_refuse_as_one(tmp_path: Path) -> None:
    ticks = [["good", "fine"], ["good", "fail by design"], ["good", "diverge"], ["last"]]
    first, second = _run(tmp_path, ticks)
    assert first == second, "every rank has the same requests in the same state"
    assert all(first["broadcasts"])
    assert first["ticks"][0] == [[1, None, None, False]] * 2
    # The stage raises for the batch, so both members have the error; none of them is committed on rank 0 either.
    failed = first["ticks"][1]
    assert [row[0] for row in failed] == [0, 0]
    assert all(row[1] == "GenerationError" and row[3] for row in failed)
    assert failed[1][2] == "rank 1: stage failed: RuntimeError: by design"
    good, diverged = first["ticks"][2]
    assert good == [0, None, None, True]
    assert diverged[1] == "RanksDiverged"
    assert "ranks [1]" in diverged[2]
    assert first["ticks"][3] == [[1, None, None, False]]
    assert first["units"] == {"stage": 3, "last": 0}


@pytest.mark.slow
def test_whatever_differs_is_named(tmp_path: Path) -> None:
    ticks = [["more units"], ["frames"], ["shape"], ["not finite"], ["ends early"], ["good"], ["another tick"]]
    first, second = _run(tmp_path, ticks)
    *differing, odd, early, good = first["ticks"]
    for ((step, kind, message, dropped),) in differing:
        assert (step, kind, dropped) == (0, "RanksDiverged", True)
        assert "ranks [1] computed other values than rank 0, or have other units to do" in message
    assert odd[0][1] == "NanOutput"
    assert odd[0][2].startswith("rank 1: stage: 3 of 3 latents are not finite")
    # Rank 1 has ended the request when rank 0 plans its last stage.
    assert early == [[0, "RanksDiverged", "rank 1: request 4-0 is over on this rank, and in last on rank 0", False]]
    assert second["ticks"][4] == []
    assert good == second["ticks"][5] == [[1, None, None, False]]
    # No request's failure: the ranks cannot go on together, and end.
    assert first["apart"] == second["apart"] == "ranks vote on different ticks: [6, 7]"


@pytest.mark.slow
def test_the_longest_error_texts_arrive(tmp_path: Path) -> None:
    first, second = _run(tmp_path, [["fail " + text] for text in ("\x1b" * 600, "猫" * 5000)] + [["good"]])
    assert first == second
    *failed, good = first["ticks"]
    assert [kind for ((_, kind, _, _),) in failed] == ["GenerationError"] * 2
    assert good == [[1, None, None, False]]
