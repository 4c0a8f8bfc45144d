"""Faults on purpose, for tests: the environment variable ``DIFFGEN_FAULT``.

It holds faults with a semicolon between them, each ``KIND@STAGE:UNIT:RANK[:TIMES[:PROMPT]]``: on rank RANK, in unit
UNIT (from 0) of STAGE, for requests whose prompt begins with PROMPT, the first TIMES times (1 when left out). UNIT,
RANK and TIMES may be ``*``. Beside the model's stages there are ``load``, ``forward`` (the denoiser in a step) and, on
rank 0, ``send``. Kinds:

- ``raise`` an exception, ``oom`` (as when memory runs out)
- ``exit`` the process at once, ``hang`` for ever
- ``nan`` in what the unit computes, ``differ`` from the other ranks in the last bits
- ``skip`` the unit, with the collectives that others wait in
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from diffgen.errors import InvalidRequest
from diffgen.request import UNSET, Req, Update
from diffgen.worker.context import Predict, Row, Stage, StageContext

VARIABLE = "DIFFGEN_FAULT"
_FORM = re.compile(
    r"(?P<kind>raise|oom|exit|hang|nan|differ|skip)@(?P<stage>\w+):(?P<unit>\d+|\*):(?P<rank>\d+|\*)"
    r"(:(?P<times>\d+|\*)(:(?P<prompt>[^;]*))?)?"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """``text`` is the whole fault, by which it is counted."""

    text: str
    kind: str
    stage: str
    unit: str
    rank: str
    times: str
    prompt: str

    def fits(self, stage: str, unit: int, prompt: str) -> bool:
        return self.stage == stage and self.unit in ("*", str(unit)) and prompt.startswith(self.prompt)


class Faults:
    """Those of one rank. How often each has struck stands in ``folder``, so that it outlives the process."""

    def __init__(self, text: str, rank: int, folder: Path) -> None:
        self._folder = folder
        parts = [part.lstrip() for part in text.split(";") if part.strip()]
        self._faults = [fault for fault in map(_parse, parts) if fault.rank in ("*", str(rank))]

    @classmethod
    def from_environment(cls, rank: int, folder: Path) -> Faults:
        """Raises :class:`InvalidRequest` for a text of another form."""
        return cls(os.environ.get(VARIABLE, ""), rank, folder)

    def at(self, stage: str, unit: int = 0, prompts: Iterable[str] = ("",)) -> str | None:
        """Raise, end or hang here, if that is due; else the kind of fault that the caller must make, or None."""
        for fault in self._faults:
            if any(fault.fits(stage, unit, prompt) for prompt in prompts) and self._count(fault):
                return _strike(fault)
        return None

    def install(self, stages: Sequence[Stage]) -> None:
        """Let the faults strike in these stages."""
        for stage in stages if self._faults else []:
            vars(stage)["run"] = self._faulty(stage, stage.run)

    def _faulty(
        self, stage: Stage, run: Callable[[Sequence[Req], StageContext], list[Update]]
    ) -> Callable[[Sequence[Req], StageContext], list[Update]]:
        def faulty(reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
            def map_rows(predict: Predict, rows: Sequence[Row]) -> list[torch.Tensor]:
                def faulty_predict(share: Sequence[Row]) -> list[torch.Tensor]:
                    for req in reqs:
                        self.at("forward", req.unit, [req.params.prompt])
                    return predict(share)

                return whole.map_rows(faulty_predict, rows)

            whole, ctx = ctx, dataclasses.replace(ctx, map_rows=map_rows)
            kinds = [self.at(stage.name, req.unit, [req.params.prompt]) for req in reqs]
            if "skip" in kinds:
                return [Update() for _ in reqs]
            updates = run([_spoilt(req) if kind == "nan" else req for req, kind in zip(reqs, kinds, strict=True)], ctx)
            for update, kind in zip(updates, kinds, strict=True):
                if kind is not None:
                    _change(update, float("nan") if kind == "nan" else 1 + 1e-6)
                if kind == "differ" and update.frames is not UNSET:
                    update.frames = (*update.frames[:-1], update.frames[-1] ^ 1)
            return updates

        return faulty

    def _count(self, fault: Fault) -> bool:
        """Whether it strikes once more."""
        if fault.times == "*":
            return True
        marks = self._folder / f"fault-{fault.text.encode().hex()[:200]}"
        struck = len(marks.read_bytes()) if marks.exists() else 0
        if struck >= int(fault.times):
            return False
        with marks.open("ab") as file:
            file.write(b".")
        return True


def _parse(text: str) -> Fault:
    match = _FORM.fullmatch(text)
    if match is None:
        rule = "must be KIND@STAGE:UNIT:RANK[:TIMES[:PROMPT]], such as exit@denoise:1:0"
        raise InvalidRequest(f"{VARIABLE} {text!r:.100} {rule}", param=VARIABLE)
    found = match.groupdict()
    return Fault(text, **found | {"times": found["times"] or "1", "prompt": found["prompt"] or ""})


def _strike(fault: Fault) -> str:
    if fault.kind == "exit":
        os._exit(9)
    if fault.kind == "hang":
        time.sleep(86400)
    if fault.kind == "raise":
        raise RuntimeError(f"fault on purpose: {fault.text}")
    if fault.kind == "oom":
        raise torch.OutOfMemoryError(f"fault on purpose: {fault.text}")
    return fault.kind


def _spoilt(req: Req) -> Req:
    return req if req.latents is None else dataclasses.replace(req, latents=req.latents * float("nan"))


def _change(update: Update, factor: float) -> None:
    if update.latents is not UNSET:
        update.latents = update.latents * factor
    if update.branches is not UNSET:
        update.branches = tuple(
            {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in branch.items()}
            for branch in update.branches
        )
