"""ParallelDims: how a replica's ranks share the work, and the rules that a layout must keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

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
        replicas = nearest((run.dp_size,), ((each,) for each in divisors(run.num_gpus)))[0]
        below = run.num_gpus // run.dp_size * run.dp_size
        total = nearest((run.num_gpus,), ((each,) for each in (below, below + run.dp_size) if each))[0]
        rule = f"num_gpus {run.num_gpus} does not divide by dp_size {run.dp_size}"
        refuse("dp_size", f"{rule}; nearest: num_gpus {run.num_gpus} with dp_size {replicas}; or num_gpus {total}")
    return run.num_gpus // run.dp_size


def check_degrees(run: RunArgs) -> None:
    """The rules that need no model. Raises :class:`InvalidRequest` naming every factor and the nearest legal choice."""
    asked = _asked(run)
    if run.sp_degree is not None and (run.ulysses_degree, run.ring_degree) != (None, None):
        ulysses, ring = run.ulysses_degree, run.ring_degree
        whole = None not in (ulysses, ring)
        product = (ulysses or 1) * (ring or 1)
        if run.sp_degree % product or (whole and product != run.sp_degree):
            factors = " x ".join(
                f"{name} {value}" for name, value in (("ulysses_degree", ulysses), ("ring_degree", ring))
            )
            rule = f"sp_degree {run.sp_degree} is not {factors}; leave one of the three out"
            refuse("sp_degree", f"{rule}; {_for_all_ranks(run)}")
    if run.enable_cfg_parallel and run.cfg_degree not in (None, 2):
        rule = f"cfg_degree {run.cfg_degree} and enable_cfg_parallel, which means 2; leave one out"
        refuse("cfg_degree", f"{rule}; {_for_all_ranks(run)}")
    total = math.prod(asked.values()) * run.dp_size
    if asked and total != run.num_gpus:
        factors = " x ".join(f"{name} {value}" for name, value in asked.items())
        replicas = f" x dp_size {run.dp_size}" if run.dp_size > 1 else ""
        rule = f"{factors}{replicas} = {total} ranks, but num_gpus is {run.num_gpus}"
        refuse("num_gpus", f"{rule}; {_for_all_ranks(run)}; or num_gpus {total}")
    ranks_of_replica(run)
    if run.attention_backend == "xfuser":
        if run.device == "cpu":
            rule = "attention_backend xfuser needs CUDA, and device is cpu"
            refuse("attention_backend", f"{rule}; use attention_backend native")
        if (run.tp_size or 1) > 1:
            rule = f"attention_backend xfuser splits tokens over neighbouring ranks, which tp_size {run.tp_size} takes"
            remedy = f"use attention_backend native; {_for_all_ranks(run, _suits_xfuser)}"
            refuse("attention_backend", f"{rule}; {remedy}")


def choose_dims(run: RunArgs, model: Abilities, name: str) -> tuple[ParallelDims, str]:
    """The layout of a replica for the model ``name``, and why it is that.

    Degrees that are given are taken; ``num_gpus`` alone is shared out. Raises :class:`InvalidRequest`.
    """
    check_degrees(run)
    dims, why = _choose(run, model, name)
    if run.attention_backend == "xfuser" and not _suits_xfuser(dims):
        rule = f"attention_backend xfuser is for split tokens, and {dims} splits none"
        refuse("attention_backend", f"{rule}; give ulysses_degree or ring_degree, or use attention_backend native")
    return dims, why


def _choose(run: RunArgs, model: Abilities, name: str) -> tuple[ParallelDims, str]:
    world, asked = ranks_of_replica(run), _asked(run)
    if world == 1:
        return ParallelDims(), "one rank"
    if not asked:
        found = _shared_out(world, model, name)
        if found is None:
            _refuse_sharing(run, model, name)
        return found
    ulysses, ring = _tokens(run, model.heads // (run.tp_size or 1))
    dims = ParallelDims(run.tp_size or 1, ulysses, ring, asked.get("cfg_degree", 1))
    _check_model(run, dims, model, name)
    return dims, "as asked"


def _asked(run: RunArgs) -> dict[str, int]:
    """The degrees that were given, by name."""
    tokens = ("sp_degree",) if run.sp_degree is not None else ("ulysses_degree", "ring_degree")
    names = ("tp_size", *tokens, "cfg_degree")
    found = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
    return found | ({"cfg_degree": 2} if run.enable_cfg_parallel else {})


def _tokens(run: RunArgs, heads: int = 1) -> tuple[int, int]:
    """The degrees of Ulysses and Ring; of ``sp_degree`` alone Ulysses takes what divides ``heads``."""
    ulysses, ring, whole = run.ulysses_degree, run.ring_degree, run.sp_degree or 1
    if ulysses is None:
        ulysses = math.gcd(whole, heads) if ring is None else max(1, whole // ring)
    return ulysses, ring or max(1, whole // ulysses)


def _has_sp_alone(run: RunArgs) -> bool:
    return run.sp_degree is not None and run.ulysses_degree is run.ring_degree is None


def _shared_out(world: int, model: Abilities, name: str) -> tuple[ParallelDims, str] | None:
    """Guidance branches first, which need no communication inside a forward, then tokens, else weights; None where
    neither can be split."""
    cfg = 2 if model.guided and not model.rows and world % 2 == 0 else 1
    rest = world // cfg
    why = f"{name} is guided: two branches" if cfg > 1 else ""
    if rest == 1:
        return ParallelDims(cfg=cfg), why
    if not model.sequence:
        ulysses = math.gcd(rest, model.heads)
        dims = ParallelDims(1, ulysses, rest // ulysses, cfg)
        parts = " x ".join(f"{axis} {size}" for axis, size in (("ulysses", ulysses), ("ring", dims.ring)) if size > 1)
        return dims, "; ".join(filter(None, [why, f"tokens over {rest}: {parts}, as it has {model.heads} heads"]))
    if not model.tensor and model.heads % rest == 0:
        dims = ParallelDims(rest, 1, 1, cfg)
        return dims, "; ".join(filter(None, [why, f"weights over {rest}, since {model.sequence}"]))
    return None


def _refuse_sharing(run: RunArgs, model: Abilities, name: str) -> NoReturn:
    legal = (
        (each,)
        for each in divisors(run.num_gpus)
        if each == run.num_gpus or _shared_out(run.num_gpus // each, model, name) is not None
    )
    reasons = "; ".join(dict.fromkeys(filter(None, (model.sequence, model.tensor))))
    rule = f"{name} cannot be split over {ranks_of_replica(run)} ranks: {reasons}"
    remedy = f"nearest: num_gpus {run.num_gpus} with dp_size {nearest((run.dp_size,), legal)[0]}"
    refuse("num_gpus", f"{rule}; {remedy}", "unsupported_layout")


def _check_model(run: RunArgs, dims: ParallelDims, model: Abilities, name: str) -> None:
    tokens = "sp_degree" if _has_sp_alone(run) else "ulysses_degree" if dims.ulysses > 1 else "ring_degree"
    for param, (degree, reason) in zip(("tp_size", tokens, "cfg_degree"), _reasons(dims, model), strict=True):
        if degree > 1 and reason:
            rule = f"{param} {degree}: {name} takes 1 alone, since {reason}"
            refuse(param, f"{rule}; {_for_all_ranks(run, lambda dims: _suits(dims, model))}", "unsupported_layout")
    if not _suits(dims, model):
        param = "ulysses_degree" if dims.ulysses > 1 else "tp_size"
        factors = f"tp_size {dims.tp} x ulysses_degree {dims.ulysses} = {dims.tp * dims.ulysses}"
        legal = list(divisors(model.heads))
        rule = f"{name} has {model.heads} attention heads, which do not divide by {factors}"
        known = f"legal products: {', '.join(map(str, legal))} (ring_degree may be any)"
        # There may be no more devices than were asked for.
        shares = (share for product in legal if product <= dims.tp * dims.ulysses for share in _factors(product, 2))
        found = nearest((dims.tp, dims.ulysses), shares)
        refuse(param, f"{rule}; {known}; {_told(run, (run.dp_size, *found, dims.ring, dims.cfg))}")


def _reasons(dims: ParallelDims, model: Abilities) -> Sequence[tuple[int, str]]:
    """Degrees over weights, tokens and guidance, each with why it must be 1, if it must."""
    return (dims.tp, model.tensor), (dims.sp, model.sequence), (dims.cfg, model.rows)


def _suits(dims: ParallelDims, model: Abilities) -> bool:
    able = not any(degree > 1 and reason for degree, reason in _reasons(dims, model))
    local = dims.tp * dims.ulysses
    return able and (local == 1 or model.heads % local == 0)


def _suits_xfuser(dims: ParallelDims) -> bool:
    return dims.tp == 1 < dims.sp


def divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def nearest(wanted: tuple[int, ...], legal: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Of ``legal`` degrees those most like the ``wanted``: above 1 on the same axes, then of nearly as many ranks, then
    with nearly the same degrees; of two that are as near the smaller."""

    def apart(degrees: tuple[int, ...]) -> tuple[Any, ...]:
        pairs = list(zip(degrees, wanted, strict=True))
        other_axes = sum((ours > 1) != (theirs > 1) for ours, theirs in pairs)
        size = math.prod(degrees)
        distance = sum(abs(ours - theirs) for ours, theirs in pairs)
        return other_axes, abs(size - math.prod(wanted)), distance, size, degrees

    return min(legal, key=apart)


def _for_all_ranks(run: RunArgs, suits: Callable[[ParallelDims], bool] = lambda dims: True) -> str:
    """The layout nearest to what was asked of those that take all of ``num_gpus``; there must be one."""
    cfg = run.cfg_degree or (2 if run.enable_cfg_parallel else 1)
    wanted = (run.dp_size, run.tp_size or 1, *_tokens(run), cfg)
    # More than two parts of guidance are for those who ask for them.
    most = max(2, cfg)
    legal = (each for each in _factors(run.num_gpus, 5) if each[-1] <= most and suits(ParallelDims(*each[1:])))
    return _told(run, nearest(wanted, legal))


def _factors(product: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of ``parts`` numbers."""
    if parts == 1:
        yield (product,)
        return
    for first in divisors(product):
        for rest in _factors(product // first, parts - 1):
            yield (first, *rest)


def _told(run: RunArgs, degrees: Sequence[int]) -> str:
    """Degrees of replicas, weights, Ulysses, Ring and guidance as the options that ask for them."""
    replicas, weights, ulysses, ring, guidance = degrees
    tokens = {"sp_degree": ulysses * ring} if _has_sp_alone(run) else {"ulysses_degree": ulysses, "ring_degree": ring}
    named = {"dp_size": replicas, "tp_size": weights, **tokens, "cfg_degree": guidance}
    layout = " x ".join(f"{name} {value}" for name, value in named.items() if value > 1)
    return f"nearest: num_gpus {math.prod(degrees)}{layout and f' with {layout}'} alone"
