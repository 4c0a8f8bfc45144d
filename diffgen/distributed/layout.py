"""Layout: a replica's dims with the groups of this rank."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist

from diffgen.distributed.attention import SequenceAttention, UnifiedAttention
from diffgen.distributed.axis import AxisGroup, EmptyGroup
from diffgen.distributed.collectives import Collectives, ProcessGroupCollectives, SharedMemoryCollectives
from diffgen.distributed.dims import AXES, ParallelDims
from diffgen.distributed.groups import NEVER, Control, RankInfo
from diffgen.distributed.xfuser import load_xfuser
from diffgen.errors import InvalidRequest

VARIABLE = "DIFFGEN_COLLECTIVES"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How this rank takes part. ``sequence`` has the ranks of ``ulysses`` and ``ring``, ulysses fastest.

    ``attention`` is that over the tokens of ``sequence``; None where tokens are whole. ``peers_hear``: ranks that wait
    for this rank in a collective hear it when this one votes instead.
    """

    dims: ParallelDims = dataclasses.field(default_factory=ParallelDims)
    tp: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    ulysses: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    ring: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    sequence: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    cfg: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    decode: AxisGroup = dataclasses.field(default_factory=AxisGroup)
    attention: SequenceAttention | None = None
    peers_hear: bool = False

    def groups(self) -> dict[str, AxisGroup]:
        fields = dataclasses.fields(self)
        return {field.name: group for field in fields if isinstance(group := getattr(self, field.name), AxisGroup)}


def empty_layout(dims: ParallelDims, parallel_decode: bool = True) -> Layout:
    """A layout of rank 0, to whose share nothing is larger, for models without weights; without process groups."""
    sizes = {axis: getattr(dims, axis) for axis in AXES} | {"sequence": dims.sp}
    groups: dict[str, AxisGroup] = {name: EmptyGroup(size) for name, size in sizes.items()}
    return Layout(
        dims, **groups, decode=EmptyGroup(dims.world if parallel_decode else 1), attention=None, peers_hear=False
    )


def make_layout(
    dims: ParallelDims,
    info: RankInfo,
    device: torch.device,
    parallel_decode: bool = True,
    attention_backend: str = "native",
    control: Control | None = None,
) -> Layout:
    """The groups of every axis, each of which runs one collective, so that a fault shows at start.

    Every rank makes all groups, also those it is not in, in one order. Groups of the same ranks are one: each process
    group of gloo has a thread that wakes a hundred times a second. With a ``control``, ranks exchange through shared
    memory, for which :func:`may_share_memory`; else there must be a default process group.
    """
    axes = {"tp": ["tp"], "ulysses": ["ulysses"], "ring": ["ring"], "sequence": ["ulysses", "ring"], "cfg": ["cfg"]}
    if parallel_decode:
        axes["decode"] = ["tp", "ulysses", "ring", "cfg"]
    found: dict[str, AxisGroup] = {}
    made: dict[tuple[int, ...], Collectives] = {}
    for name, along in axes.items():
        for ranks in map(tuple, dims.groups(along)):
            if len(ranks) == 1 or (control is not None and info.rank not in ranks):
                continue
            if ranks not in made:
                made[ranks] = SharedMemoryCollectives(control, ranks) if control else _process_group(ranks, info.size)
            if info.rank in ranks:
                found[name] = AxisGroup(ranks.index(info.rank), len(ranks), made[ranks])
    groups = {name: found.get(name, AxisGroup()) for name in ("tp", "ulysses", "ring", "sequence", "cfg", "decode")}
    for group in groups.values():
        if group.size > 1:
            group.all_reduce(torch.ones(1, device=device))
            group.sent = group.calls = 0
    attention: SequenceAttention | None = None
    if dims.sp > 1:
        native = UnifiedAttention(groups["ulysses"], groups["ring"])
        attention = load_xfuser(dims, device) if attention_backend == "xfuser" else native
    return Layout(dims, **groups, attention=attention, peers_hear=control is not None)


def may_share_memory(device: torch.device) -> bool:
    """Whether ranks on the CPU have files without a name to share, and nobody has asked for gloo.

    Raises :class:`InvalidRequest` for what cannot be asked for.
    """
    asked, able = os.environ.get(VARIABLE), hasattr(os, "memfd_create")
    if asked not in (None, "shared", "gloo"):
        raise InvalidRequest(f"{VARIABLE}={asked!r}: it takes 'shared' or 'gloo'", param=VARIABLE)
    if device.type != "cpu":
        if asked is not None:
            rule = f"is for CPU processes, and ranks on {device.type} exchange over NCCL"
            raise InvalidRequest(f"{VARIABLE}={asked!r} {rule}; leave it out", param=VARIABLE)
        return False
    if asked == "shared" and not able:
        raise InvalidRequest(f"{VARIABLE}='shared' needs files without a name (Linux); take 'gloo'", param=VARIABLE)
    return asked != "gloo" and able


def _process_group(ranks: tuple[int, ...], size: int) -> Collectives:
    # What all ranks share is the default group.
    return ProcessGroupCollectives(None if len(ranks) == size else dist.new_group(ranks, timeout=NEVER))
