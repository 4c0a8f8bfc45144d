"""One rank that lets the real xfuser compute attention over split tokens, on a CPU: run as a script by a test.

xfuser asks for a GPU when it is imported, makes its groups for one, and has kernels for one alone: those three are told
otherwise, and what is tried is its USP, its groups and diffgen's use of them.

    python tests/support/xfuser_rank.py FOLDER RANK ULYSSES RING
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from diffgen.args import RunArgs
from diffgen.distributed.attention import UnifiedAttention, native_kernel
from diffgen.distributed.dims import ParallelDims
from diffgen.distributed.groups import RankInfo, join
from diffgen.distributed.layout import make_layout
from diffgen.distributed.xfuser import load_xfuser
from diffgen.loading.device import choose_device


def _without_gpu() -> None:
    # What is read while it is imported.
    torch.version.cuda = torch.version.cuda or "12.8"
    from xfuser.core.distributed import attention_backend, parallel_state, runtime_state
    from xfuser.model_executor.layers import usp
    from yunchang.globals import PROCESS_GROUP

    # It looks for its packages on GPUs alone, and sets a device.
    runtime_state.env_info["has_flash_attn"] = True
    for name, module in list(sys.modules.items()):
        if name.startswith("xfuser.") and hasattr(module, "HAS_LONG_CTX_ATTN"):
            module.HAS_LONG_CTX_ATTN = True
    parallel_state.set_device = lambda index: None
    usp.PROCESS_GROUP = PROCESS_GROUP

    def kernel(query: Any, key: Any, value: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert not options["dropout_p"]
        assert not options["is_causal"]
        out, lse = native_kernel(*(each.transpose(1, 2) for each in (query, key, value)), None)
        return out.transpose(1, 2), lse.transpose(1, 2)

    for kind in attention_backend.AttentionBackendType:
        attention_backend.ATTENTION_FUNCTION_REGISTRY[kind] = kernel


def main(folder: str, rank: int, ulysses: int, ring: int) -> None:
    dims = ParallelDims(ulysses=ulysses, ring=ring)
    info = RankInfo(rank, dims.world)
    device = choose_device(RunArgs(device="cpu", threads=1), info)
    join(info, Path(folder) / "rendezvous", device)
    layout = make_layout(dims, info, device)
    _without_gpu()
    found = load_xfuser(dims, torch.device("cpu", rank))
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 6 * dims.world, 4, 16)
    sizes = [6] * dims.world
    mine = whole[:, :, 6 * rank : 6 * rank + 6]
    out = found(*mine, sizes, None)
    own = UnifiedAttention(layout.ulysses, layout.ring)(*mine, sizes, None)
    expected = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in whole))
    expected = expected.transpose(1, 2)[:, 6 * rank : 6 * rank + 6]
    print(float((out - expected).abs().max()), float((out - own).abs().max()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(each) for each in sys.argv[2:]))
