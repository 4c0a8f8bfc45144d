"""Whether there is memory: for a model before it is loaded, and for a request before it is accepted."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from safetensors import SafetensorError, safe_open

from diffgen.args import ModelArgs
from diffgen.errors import ModelError, StartFailed
from diffgen.loading.device import default_dtype
from diffgen.loading.index import read_index
from diffgen.params import SamplingParams
from diffgen.scheduler.job import NOTHING, Need

logger = logging.getLogger(__name__)

# Of every pixel of an output: several times what any decoder keeps for it at a time. What has this much is not looked
# at more closely, which takes a fraction of a second.
_PLENTY = 32 * 1024
#: Where a model's weights do not fit.
MORE_MEMORY = "use a smaller dtype, fewer ranks on a CPU, or a device with more memory"
_LFS = b"version https://git-lfs"
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device, ranks: int = 1) -> int:
    """Memory that one of ``ranks`` alike can still take on its device: on a CPU all of the machine share it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = psutil.virtual_memory().available
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    return (free if limit is None or used is None else min(free, limit - used)) // ranks


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def check_weights(folder: Path, model: ModelArgs, device: torch.device, ranks: int, parts: int = 1) -> None:
    """Raises :class:`StartFailed` where the model's weights cannot fit; reads only the heads of their files.

    Of ``parts`` into which ranks may slice the weights, each holds one at least. Raises :class:`ModelError` for a file
    that is not whole.
    """
    need, free = weight_bytes(folder, model, device) // parts, available_bytes(device, ranks)
    if need > free:
        where = f"each of {ranks} rank(s) on {device.type}"
        numbers = f"the weights of {folder} take {_mib(need)} MiB and {where} has {_mib(free)} MiB"
        raise StartFailed(f"{numbers}; {MORE_MEMORY}", code="insufficient_memory")


def weight_bytes(folder: Path, model: ModelArgs, device: torch.device) -> int:
    """Of all components, in the numbers that they are loaded in."""
    index = read_index(folder, model.variant, model.safety_checker)
    dtype = default_dtype(device) if model.dtype is None else getattr(torch, model.dtype)
    names = [name for name, kind in index.components.items() if kind is not None and name not in index.left_out]
    count = sum(_elements(path) for name in names for path in _weight_files(folder / name, model.variant))
    return count * dtype.itemsize


def _weight_files(component: Path, variant: str | None) -> Iterator[Path]:
    infix = f".{variant}" if variant else ""
    for shards in sorted(component.glob(f"*.safetensors.index{infix}.json"))[:1]:
        weights = json.loads(shards.read_text(encoding="utf-8")).get("weight_map", {})
        yield from (component / name for name in sorted(set(weights.values())))
        return
    for path in component.glob("*.safetensors"):
        name = path.name.removesuffix(".safetensors")
        if name.partition(".")[2] == (variant or "") and not re.search(r"-\d+-of-\d+$", name):
            yield path


def _elements(path: Path) -> int:
    """Numbers in a safetensors file, as its head has it. Raises :class:`ModelError` where it is none, or cut off."""
    try:
        with safe_open(path, framework="pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        reason = "it is a pointer of Git LFS; run git lfs pull" if is_pointer else f"{error}; get it again"
        raise ModelError(f"{path} is no whole safetensors file: {reason}", code="model_incomplete") from error


class RequestMemory:
    """What requests need on a rank.

    ``open_empty`` makes the pipeline of the rank's layout without weights, when that is first needed.
    """

    def __init__(self, device: torch.device, ranks: int, open_empty: Callable[[], Any]) -> None:
        self._device, self._ranks, self._open_empty = device, ranks, open_empty
        self._available = available_bytes(device, ranks)
        self._known = functools.lru_cache(maxsize=256)(self._estimate)

    def available(self) -> int:
        """Bytes that requests may take on this rank, as of now; as before where the system does not say."""
        try:
            self._available = available_bytes(self._device, self._ranks)
        except OSError as error:  # as of a process that may open no more files
            logger.warning("what memory is free cannot be read: %s", error)
        return self._available

    def needs(self, params: SamplingParams, available: int) -> Need | None:
        """Bytes that a request with resolved ``params`` holds while it is in flight, and that one unit works with.

        None of either where that is little beside ``available``, or the family does not tell; None where the estimate
        fails.
        """
        pixels = (params.width or 1) * (params.height or 1) * (params.num_frames or 1)
        if pixels * (params.num_outputs_per_prompt or 1) * _PLENTY <= available:
            return NOTHING
        negative = None if params.negative_prompt is None else ""
        texts = {"prompt": "", "negative_prompt": negative, "seed": 0, "priority": None, "time_limit": None}
        return self._known(msgspec.structs.replace(params, **texts))

    @functools.cached_property
    def _pipeline(self) -> Any:
        return self._open_empty()

    def _estimate(self, params: SamplingParams) -> Need | None:
        from diffgen.loading.estimate import estimate_memory

        try:
            found = estimate_memory(self._pipeline, params)
        except Exception:
            # An estimate that fails must not keep a request from running: memory that lacks is an error of its own.
            logger.warning("no estimate of memory for %s", params, exc_info=True)
            return None
        latents, pixels, denoise, decode = (found[name] or 0.0 for name in ("latents", "pixels", "denoise", "decode"))
        return Need(int((latents + pixels) * 2**20), int(max(denoise, decode) * 2**20))


def _mib(size: int) -> int:
    return round(size / 2**20)
