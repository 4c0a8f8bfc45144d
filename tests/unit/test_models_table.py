"""docs/models.md's table of families is the registry's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "models_table.py"


@pytest.mark.slow
def test_the_table_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("models_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert script.with_table(page, script.table()) == page, "run scripts/models_table.py --write"
