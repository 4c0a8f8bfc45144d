"""Run tests/parity/test_layouts.py and write what it finds into the tables of docs/parallelism.md.

python scripts/parity_table.py [-k "ring and not ulysses"] [other options of pytest]

A line is written when its test has passed; lines of tests that are left out stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parallelism.md"


class Tables:
    """A plugin of pytest."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report: Any = yield
        makers = {"test_a_layout_makes_the_pixels_of_one_rank": exact, "test_a_layout_in_bfloat16": half}
        if report.when == "call" and report.passed and item.originalname in makers:
            make = makers[item.originalname]
            layout, family, bench = (item.funcargs[name] for name in ("layout", "family", "bench"))
            pairs = item.module.HALF_PAIRS if make is half else item.module.PAIRS
            write(make.__name__, pairs, (layout, family), make(item.module, bench, layout, family))
        return report


def write(table: str, pairs: list[tuple[str, str]], pair: tuple[str, str], cells: list[str]) -> None:
    """Put a line into a table of the page, between its marks; ``pairs`` are all lines that it has."""
    begin, end = f"<!-- {table}: written by scripts/parity_table.py -->\n", f"<!-- end of {table} -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    old, _, after = rest.partition(end)
    head, rule, *rows = old.splitlines()
    found = {tuple(row.strip("| ").split(" | ")[:2]): row for row in rows}
    found[pair] = f"| {' | '.join([*pair, *cells])} |"
    lines = [head, rule, *(found[each] for each in pairs if each in found)]
    PAGE.write_text("".join([before, begin, *(f"{each}\n" for each in lines), end, after]), encoding="utf-8")


def exact(tests: Any, bench: Any, layout: str, family: str) -> list[str]:
    """In float32, the worst of its requests and ranks; bytes are the most that a rank sent."""
    levels, latents, sent, decode = 0, 0.0, 0, 0
    for mix in tests.MIXES[family]:
        alone = bench.alone(family, mix)
        for rank in bench.ranks(layout):
            made = rank[family].mixes[mix]
            levels = max([levels, *map(tests.level_difference, made.pixels, alone.pixels)])
            latents = max([latents, *map(tests.relative_difference, made.latents, alone.latents)])
            sent = max(sent, sum(made.sent.values()))
            decode = max(decode, sum(made.sent_decoding.values()))
    return [str(levels), f"{latents:.1e}", f"{sent / 1e3:.0f}", f"{decode / 1e3:.0f}"]


def half(tests: Any, bench: Any, layout: str, family: str) -> list[str]:
    """In bfloat16, the worst of the ranks: from one rank and from float32, each beside its bar."""
    alone, ranks = bench.half(family), tests.half_latents(bench, layout, family)
    one, whole = (max(tests.mean_difference(each, to) for each in ranks) for to in (alone.latents, alone.exact))
    return [f"{value:.2%}" for value in (one, alone.batches, whole, alone.rounding)]


if __name__ == "__main__":
    tests = ROOT / "tests" / "parity" / "test_layouts.py"
    sys.exit(pytest.main(["--rootdir", str(ROOT), str(tests), *sys.argv[1:]], plugins=[Tables()]))
