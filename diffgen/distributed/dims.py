"""ParallelDims: how a replica's ranks share the work, and the rules that a layout must keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diffgen.fields import refuse

if TYPE_CHECKING:
    from diffgen.args import RunArgs

# Fastest first: ranks 0 and 1 differ in the first axis whose degree is above 1.
AXES = ("tp", "ulysses", "ring", "cfg")


@dataclasses.dataclass(frozen=True)
class Abilities:
    """By what a model can be split. A text is the reason why it cannot be; empty where it can.

    Attributes:
        heads: attention heads of the denoiser, which ``tp`` and ``ulysses`` share out.
        rows: about guidance branches, which ``cfg`` shares out.
        guided: requests have two branches unless they ask otherwise.
    """

    heads: int = 0
    tensor: str = ""
    sequence: str = ""
    rows: str = ""
    guided: bool = False


@dataclasses.dataclass(frozen=True)
class ParallelDims:
    """The degrees of one replica; their product is its number of ranks."""

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    cfg: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.sp * self.cfg

    @property
    def sp(self) -> int:
        """Parts into which tokens are split."""
        return self.ulysses * self.ring

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that differ in ``axes`` alone, each in rank order; every rank is in one of them."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self._coordinates(rank)
            found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(found.values())

    def _coordinates(self, rank: int) -> dict[str, int]:
        place = {}
        for axis in AXES:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place


def ranks_of_replica(run: RunArgs) -> int:
    """Ranks of each of ``dp_size`` replicas. Raises :class:`InvalidRequest` where ``num_gpus`` does not divide."""
    if run.num_gpus % run.dp_size:
        below = run.num_gpus // run.dp_size * run.dp_size
        legal = " or ".join(str(each) for each in (below, below + run.dp_size) if each > 0)
        refuse("dp_size", f"num_gpus {run.num_gpus} does not divide by dp_size {run.dp_size}; use num_gpus {legal}")
    return run.num_gpus // run.dp_size


def check_degrees(run: RunArgs) -> None:
    """The rules that need no model. Raises :class:`InvalidRequest` naming every factor."""
    world, asked = ranks_of_replica(run), _asked(run)
    if run.sp_degree is not None and (run.ulysses_degree, run.ring_degree) != (None, None):
        ulysses, ring = run.ulysses_degree, run.ring_degree
        whole = None not in (ulysses, ring)
        product = (ulysses or 1) * (ring or 1)
        if run.sp_degree % product or (whole and product != run.sp_degree):
            factors = " x ".join(
                f"{name} {value}" for name, value in (("ulysses_degree", ulysses), ("ring_degree", ring))
            )
            refuse("sp_degree", f"sp_degree {run.sp_degree} is not {factors}; leave one of the three out")
    if run.enable_cfg_parallel and run.cfg_degree not in (None, 2):
        refuse("cfg_degree", f"cfg_degree {run.cfg_degree} and enable_cfg_parallel, which means 2; leave one out")
    if asked:
        product = math.prod(asked.values())
        if product != world:
            factors = " x ".join(f"{name} {value}" for name, value in asked.items())
            replicas = f" x dp_size {run.dp_size}" if run.dp_size > 1 else ""
            total = product * run.dp_size
            rule = f"{factors}{replicas} = {total} ranks, but num_gpus is {run.num_gpus}"
            refuse("num_gpus", f"{rule}; use num_gpus {total}, or degrees whose product is {world}")
    if run.attention_backend == "xfuser":
        if run.device == "cpu":
            rule = "attention_backend xfuser needs CUDA, and device is cpu"
            refuse("attention_backend", f"{rule}; use attention_backend native")
        if (run.tp_size or 1) > 1:
            rule = f"attention_backend xfuser splits tokens over neighbouring ranks, which tp_size {run.tp_size} takes"
            refuse("attention_backend", f"{rule}; use tp_size 1, or attention_backend native")


def choose_dims(run: RunArgs, model: Abilities, name: str) -> tuple[ParallelDims, str]:
    """The layout of a replica for the model ``name``, and why it is that.

    Degrees that are given are taken; ``num_gpus`` alone is shared out. Raises :class:`InvalidRequest`.
    """
    check_degrees(run)
    dims, why = _choose(run, model, name)
    if run.attention_backend == "xfuser" and dims.sp == 1:
        rule = f"attention_backend xfuser is for split tokens, and {dims} splits none"
        refuse("attention_backend", f"{rule}; give ulysses_degree or ring_degree, or use attention_backend native")
    return dims, why


def _choose(run: RunArgs, model: Abilities, name: str) -> tuple[ParallelDims, str]:
    world, asked = ranks_of_replica(run), _asked(run)
    if world == 1:
        return ParallelDims(), "one rank"
    if not asked:
        return _shared_out(world, model, name)
    sequence = run.sp_degree or 1
    if run.ulysses_degree is None and run.ring_degree is None:
        ulysses = _share_of_heads(sequence, model.heads // (run.tp_size or 1))
    else:
        ulysses = run.ulysses_degree or max(1, sequence // (run.ring_degree or 1))
    ring = run.ring_degree or max(1, sequence // ulysses)
    dims = ParallelDims(run.tp_size or 1, ulysses, ring, asked.get("cfg_degree", 1))
    _check_model(dims, model, name)
    return dims, "as asked"


def _asked(run: RunArgs) -> dict[str, int]:
    """The degrees that were given, by name."""
    tokens = ("sp_degree",) if run.sp_degree is not None else ("ulysses_degree", "ring_degree")
    names = ("tp_size", *tokens, "cfg_degree")
    found = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
    return found | ({"cfg_degree": 2} if run.enable_cfg_parallel else {})


def _shared_out(world: int, model: Abilities, name: str) -> tuple[ParallelDims, str]:
    """Guidance branches first, which need no communication inside a forward, then tokens, else weights."""
    cfg = 2 if model.guided and not model.rows and world % 2 == 0 else 1
    rest = world // cfg
    why = f"{name} is guided: two branches" if cfg > 1 else ""
    if rest > 1 and not model.sequence:
        ulysses = _share_of_heads(rest, model.heads)
        dims = ParallelDims(1, ulysses, rest // ulysses, cfg)
        parts = " x ".join(f"{axis} {size}" for axis, size in (("ulysses", ulysses), ("ring", dims.ring)) if size > 1)
        why = "; ".join(filter(None, [why, f"tokens over {rest}: {parts}, as it has {model.heads} heads"]))
    elif rest > 1 and not model.tensor and model.heads % rest == 0:
        dims = ParallelDims(rest, 1, 1, cfg)
        why = "; ".join(filter(None, [why, f"weights over {rest}, since {model.sequence}"]))
    elif rest > 1:
        legal = "num_gpus 2, or " if model.guided and not model.rows else ""
        reasons = "; ".join(dict.fromkeys(filter(None, (model.sequence, model.tensor))))
        rule = f"{name} cannot be split over {world} ranks: {reasons}"
        refuse("num_gpus", f"{rule}; use {legal}dp_size {world} for so many replicas", "unsupported_layout")
    else:
        dims = ParallelDims(cfg=cfg)
    return dims, why


def _check_model(dims: ParallelDims, model: Abilities, name: str) -> None:
    reasons = {"tp_size": (dims.tp, model.tensor), "cfg_degree": (dims.cfg, model.rows)}
    reasons["ulysses_degree" if dims.ulysses > 1 else "ring_degree"] = (dims.sp, model.sequence)
    for param, (degree, reason) in reasons.items():
        if degree > 1 and reason:
            refuse(param, f"{param} {degree}: {name} takes 1 alone, since {reason}", "unsupported_layout")
    local = dims.tp * dims.ulysses
    if local > 1 and model.heads % local:
        param = "ulysses_degree" if dims.ulysses > 1 else "tp_size"
        factors = f"tp_size {dims.tp} x ulysses_degree {dims.ulysses} = {local}"
        legal = ", ".join(str(each) for each in range(1, model.heads + 1) if model.heads % each == 0)
        rule = f"{name} has {model.heads} attention heads, which do not divide by {factors}"
        refuse(param, f"{rule}; legal products: {legal} (ring_degree may be any)")


def _share_of_heads(parts: int, heads: int) -> int:
    """The largest divisor of ``parts`` that divides the heads."""
    return max(each for each in range(1, parts + 1) if parts % each == 0 and heads % each == 0)
