"""xfuser's USP in the place of our own attention over split tokens, on CUDA. The only file that imports xfuser.

xfuser's groups are one set a process, made once: ranks of a Ulysses group are neighbours, Ring lies outside it, and
what is left are copies. That is our order of ranks where weights are not split.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from diffgen.distributed.dims import ParallelDims
from diffgen.errors import GenerationError, StartFailed
from diffgen.fields import refuse

_NATIVE = "use attention_backend native"
# What its import raises without a GPU, without a package of its many, or beside a torch that it does not know.
_UNUSABLE = (ImportError, NotImplementedError, RuntimeError, AttributeError, AssertionError)


def check_xfuser(device: torch.device) -> None:
    """Before anything is loaded. Raises :class:`InvalidRequest` where there is no CUDA device or no such package."""
    if device.type != "cuda":
        refuse("attention_backend", f"attention_backend xfuser needs CUDA, and this rank is on {device}; {_NATIVE}")
    if importlib.util.find_spec("xfuser") is None:
        rule = "attention_backend xfuser needs the package xfuser, which is not installed"
        refuse("attention_backend", f"{rule}; install it by pip install xfuser, or {_NATIVE}")


def load_xfuser(dims: ParallelDims, device: torch.device) -> XfuserAttention:
    """Import xfuser and let it make its groups; every rank of a replica calls this at the same time.

    Raises :class:`StartFailed` with its reason where it cannot.
    """
    try:
        core = importlib.import_module("xfuser.core.distributed")
        state: Any = importlib.import_module("xfuser.core.distributed.runtime_state")
        degrees = {"ulysses_degree": dims.ulysses, "ring_degree": dims.ring, "data_parallel_degree": dims.cfg}
        backend = "nccl" if device.type == "cuda" else "gloo"
        core.init_distributed_environment(dims.world, dist.get_rank(), local_rank=device.index, backend=backend)
        core.initialize_model_parallel(**degrees, backend=backend)
        config, _ = importlib.import_module("xfuser").xFuserArgs(model="", **degrees).create_config()
        # initialize_runtime_state makes one for its own pipelines, or one whose degrees are all 1.
        state._RUNTIME = state.RuntimeState(config)
        found = (core.get_ulysses_parallel_world_size(), core.get_ring_parallel_world_size())
        usp = importlib.import_module("xfuser.model_executor.layers.usp").USP
    except _UNUSABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise StartFailed(f"attention_backend xfuser: it cannot be loaded ({reason}); {_NATIVE}") from error
    if found != (dims.ulysses, dims.ring):
        # Without its kernels for long contexts it leaves tokens where they are, and says nothing.
        rule = f"it has made groups of ulysses {found[0]} x ring {found[1]} for {dims}"
        raise StartFailed(f"attention_backend xfuser: {rule}; install yunchang, or {_NATIVE}")
    return XfuserAttention(usp)


class XfuserAttention:
    """A :class:`SequenceAttention` by xfuser's ``USP``, which takes (b, h, s, d) and as many tokens on every rank."""

    def __init__(self, usp: Callable[..., torch.Tensor]) -> None:
        self._usp = usp

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sizes: Sequence[int], scale: float | None
    ) -> torch.Tensor:
        if len(set(sizes)) > 1:
            rule = f"{sum(sizes)} tokens lie on {len(sizes)} ranks as {list(sizes)}, and attention_backend xfuser needs"
            _unsupported(f"{rule} equal parts; ask for another size or max_sequence_length")
        if scale is not None and scale != query.shape[-1] ** -0.5:
            _unsupported(f"attention_backend xfuser scales by 1 / sqrt({query.shape[-1]}) alone, not by {scale}")
        heads: list[Any] = [each.transpose(1, 2).contiguous() for each in (query, key, value)]
        return self._usp(*heads).transpose(1, 2)


def _unsupported(rule: str) -> None:
    raise GenerationError(f"{rule}, or {_NATIVE}", code="unsupported_layout")
