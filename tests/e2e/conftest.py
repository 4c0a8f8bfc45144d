"""What tests of whole processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import leftovers, run_root, wait_until


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run folders of this test, which must all be gone at its end, as must its processes."""
    with run_root() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        yield folder
        wait_until(lambda: not leftovers(folder), 5, f"nothing is left: {leftovers(folder)}")
