"""What all families' comparisons with diffusers need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import THREADS


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """As many threads in this process as the oracle has."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
