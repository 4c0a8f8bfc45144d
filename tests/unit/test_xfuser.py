"""Attention by xfuser: what is refused, how its USP is called, and the package itself where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffgen.distributed.dims import ParallelDims
from diffgen.distributed.xfuser import XfuserAttention, check_xfuser, load_xfuser
from diffgen.errors import GenerationError, InvalidRequest, StartFailed

RANK = Path(__file__).resolve().parents[1] / "support" / "xfuser_rank.py"

needs_no_xfuser = pytest.mark.skipif(importlib.util.find_spec("xfuser") is not None, reason="xfuser is installed")


def test_it_is_refused_on_a_cpu() -> None:
    with pytest.raises(InvalidRequest, match=r"xfuser needs CUDA, and this rank is on cpu; use .* native") as caught:
        check_xfuser(torch.device("cpu"))
    assert caught.value.param == "attention_backend"


@needs_no_xfuser
def test_it_is_refused_without_the_package() -> None:
    with pytest.raises(InvalidRequest, match=r"not installed; install it by pip install xfuser, or use .* native"):
        check_xfuser(torch.device("cuda", 0))
    with pytest.raises(StartFailed, match=r"cannot be loaded \(ModuleNotFoundError: .*\); use .* native"):
        load_xfuser(ParallelDims(ulysses=2), torch.device("cuda", 0))


def test_tokens_go_to_usp_as_heads_first() -> None:
    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert query.shape == (2, 4, 6, 8)
        assert all(each.is_contiguous() for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    query, key, value = torch.randn(3, 2, 6, 4, 8)
    found = XfuserAttention(whole)(query, key, value, [6, 6], None)
    heads = (each.transpose(1, 2) for each in (query, key, value))
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2))


@pytest.mark.parametrize(
    ("sizes", "scale", "words"),
    [
        ([6, 5], None, r"11 tokens lie on 2 ranks as \[6, 5\].*equal parts"),
        ([6, 6], 0.5, r"sqrt\(8\) alone, not by 0.5"),
    ],
)
def test_what_usp_cannot_do_ends_the_request(sizes: list[int], scale: float | None, words: str) -> None:
    tokens = torch.zeros(1, 6, 4, 8)
    with pytest.raises(GenerationError, match=rf"{words}.*or use attention_backend native") as caught:
        XfuserAttention(lambda *heads: heads[0])(tokens, tokens, tokens, sizes, scale)
    assert caught.value.code == "unsupported_layout"


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2)])
def test_xfuser_itself_attends_as_one_rank_does(tmp_path: Path, ulysses: int, ring: int) -> None:
    """Its own groups and USP over gloo, with a CPU's kernel in the place of its own."""
    for package in ("xfuser", "yunchang", "triton", "einops", "distvae"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    degrees = [str(ulysses), str(ring)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(tmp_path), str(rank), *degrees],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ulysses * ring)
    ]
    try:
        answers = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    for rank, (out, errors) in zip(ranks, answers, strict=True):
        assert rank.returncode == 0, errors
        print(out)
        assert max(float(each) for each in out.splitlines()[-1].split()) < 1e-6
