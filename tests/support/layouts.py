"""Layouts of several ranks: one process each, which run requests of tiny models and report what they made and did.

Run as a script, this file is the process that forks them: it reads a job a line, as JSON, and answers with exit codes
and the memory that each has taken; each rank writes a ``.npz`` and a ``.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import Case, Local, forwards

from diffgen.args import RunArgs
from diffgen.distributed.dims import ParallelDims
from diffgen.distributed.groups import RankInfo, join
from diffgen.distributed.layout import make_layout
from diffgen.loading.device import choose_device

_PATIENCE_S = 150

#: Requests that share forwards, each with the steps it has done when they meet.
Mix = Sequence[tuple[Case, int]]


@dataclasses.dataclass(frozen=True)
class Work:
    """What ranks run with one model."""

    model: Path
    mixes: Mapping[str, Mix]
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Made:
    """What one rank made of one mix and did for it.

    ``rows`` has the rows of each of its forwards, ``sent`` the bytes by group while it denoised and ``sent_decoding``
    afterwards.
    """

    pixels: list[Any]
    latents: list[Any]
    rows: list[int]
    sent: dict[str, int]
    sent_decoding: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank's report on a family: ``parameters`` of its denoiser and text encoders, and its mixes by name.

    ``memory`` is the most bytes of its own (RssAnon) that it has taken for all families, 0 unless that was looked at.
    """

    parameters: dict[str, int]
    mixes: dict[str, Made]
    memory: int = 0


def run_mix(local: Local, mix: Mix) -> Made:
    """Denoise requests together as long as they have steps, then finish each by itself."""
    reqs = [local.at_step(case, step) for case, step in mix]
    groups = local.executor.layout.groups()
    before = {name: group.sent for name, group in groups.items()}
    with forwards(local.denoiser) as seen:
        running = list(reqs)
        while running:
            local.unit(running)
            running = [req for req in running if local.pipeline.stages[req.stage] is local.denoise]
    between = {name: group.sent for name, group in groups.items()}
    finished = [local.finish(req) for req in reqs]
    return Made(
        [pixels for pixels, _ in finished],
        [latents for _, latents in finished],
        [len(timesteps) for timesteps in seen],
        {name: between[name] - before[name] for name in groups},
        {name: group.sent - between[name] for name, group in groups.items()},
    )


def parameters(local: Local) -> dict[str, int]:
    pipe = local.pipeline.pipe
    models = {name: getattr(pipe, name, None) for name in ("transformer", "unet", "text_encoder", "text_encoder_2")}
    return {
        name: sum(each.numel() for each in model.parameters()) for name, model in models.items() if model is not None
    }


class Launcher:
    """A process that has imported everything and forks the ranks of one layout after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._count = 0

    def run(
        self,
        dims: ParallelDims,
        work: Mapping[str, Work],
        *,
        parallel_decode: bool,
        shared_memory: bool = True,
        look_at_memory: bool = False,
    ) -> list[dict[str, Rank]]:
        """Every rank's reports, by the names in ``work``."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        job = {"dims": dataclasses.asdict(dims), "decode": parallel_decode, "look": look_at_memory}
        job["shared"] = shared_memory
        job["work"] = {name: (str(each.model), each.mixes, each.dtype) for name, each in work.items()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        codes, memory = json.loads(self._process.stdout.readline() or "[null, null]")
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert codes == [0] * dims.world, "\n".join(errors) or codes
        return [_read(folder, rank, work, memory[rank]) for rank in range(dims.world)]

    def close(self) -> None:
        """It has no ranks left, and nothing to clean up."""
        self._process.kill()
        with self._process:
            pass


def _read(folder: Path, rank: int, work: Mapping[str, Work], memory: int) -> dict[str, Rank]:
    report = json.loads((folder / f"{rank}.json").read_text())
    arrays = np.load(folder / f"{rank}.npz")

    def made(name: str, mix: str, count: int) -> Made:
        found = {
            kind: [arrays[f"{name}/{mix}/{kind}/{index}"] for index in range(count)] for kind in ("pixels", "latents")
        }
        return Made(**found, **report[name]["mixes"][mix])

    def mixes(name: str) -> dict[str, Made]:
        return {mix: made(name, mix, len(requests)) for mix, requests in work[name].mixes.items()}

    return {name: Rank(report[name]["parameters"], mixes(name), memory) for name in work}


def _fork(job: dict[str, Any], rank: int) -> int:
    """The process id of a rank that runs the job and ends."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(_PATIENCE_S)
        _rank(job, rank)
        os._exit(0)
    except BaseException:
        Path(job["folder"], f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def _rank(job: dict[str, Any], rank: int) -> None:
    dims, folder = ParallelDims(**job["dims"]), Path(job["folder"])
    info = RankInfo(rank, dims.world)
    device = choose_device(RunArgs(device="cpu", threads=1), info)
    control = join(info, folder / "rendezvous", None if job["shared"] else device)
    layout = make_layout(dims, info, device, job["decode"], control=control if job["shared"] else None)
    arrays: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for name, (model, mixes, dtype) in job["work"].items():
        local = Local.load(Path(model), dtype, layout)
        report[name] = {"parameters": parameters(local), "mixes": {}}
        for mix, requests in mixes.items():
            made = run_mix(local, requests)
            for kind in ("pixels", "latents"):
                arrays |= {f"{name}/{mix}/{kind}/{i}": each for i, each in enumerate(getattr(made, kind))}
            facts = dataclasses.asdict(dataclasses.replace(made, pixels=[], latents=[]))
            report[name]["mixes"][mix] = {key: facts[key] for key in ("rows", "sent", "sent_decoding")}
    np.savez(folder / f"{rank}.npz", **arrays)
    (folder / f"{rank}.json").write_text(json.dumps(report))


def _main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        children = [_fork(job, rank) for rank in range(ParallelDims(**job["dims"]).world)]
        memory = _taken(children) if job["look"] else [0] * len(children)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps([codes, memory]), flush=True)


def _taken(children: Sequence[int]) -> list[int]:
    """The most bytes of RssAnon of each child over that of its birth, looked at every two milliseconds until it ends.

    Pages of files that are only mapped are not in it.
    """
    seen: dict[int, list[int]] = {child: [] for child in children}
    left = list(children)
    while left:
        for child in list(left):
            own = [line for line in Path(f"/proc/{child}/status").read_text().splitlines() if line[:8] == "RssAnon:"]
            if own:
                seen[child].append(1024 * int(own[0].split()[1]))
            else:  # it has ended, and is not waited for yet
                left.remove(child)
        time.sleep(0.002)
    return [max(values) - values[0] for values in seen.values()]


if __name__ == "__main__":
    _main()
