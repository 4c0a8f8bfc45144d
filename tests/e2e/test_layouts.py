"""A server of four ranks in a mixed layout; tests/e2e/test_replicas.py has one of two replicas with two each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mixed
import pytest
from processes import leftovers, run_root

from diffgen import DiffGenerator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with run_root() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        yield folder


@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2, "cfg_degree": 2}], ids=str)
def test_a_mixed_layout_serves_as_one_rank_does(
    tiny_wan: Path,
    tiny_generator: DiffGenerator,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    degrees: dict[str, int],
) -> None:
    monkeypatch.setenv("DIFFGEN_FAULT", mixed.faults(rank=3))
    options: dict[str, Any] = {"num_gpus": 4, "log_level": "error", **degrees}
    alone = mixed.draw(tiny_generator)
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", **options) as generator:
        assert len(generator.ranks()) == 4
        mixed.check_batches(generator, alone)
        mixed.check_cancels(generator)
        mixed.check_failures(generator, 3, alone)
        mixed.check_agreement(generator)
        mixed.check_death(generator, alone)
    assert leftovers(root) == []
