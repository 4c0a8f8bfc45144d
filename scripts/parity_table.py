"""Write the table of docs/parallelism.md: how far each layout is from one rank, by tests/parity/test_layouts.py.

python scripts/parity_table.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "parity")]

import test_layouts  # noqa: E402
from layouts import Launcher  # noqa: E402
from oracle import level_difference, relative_difference  # noqa: E402

PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- parity: written by scripts/parity_table.py -->\n", "<!-- end of parity -->\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder))
        try:
            rows = table(test_layouts.Bench(launcher, Path(folder)))
        finally:
            launcher.close()
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(head + BEGIN + rows + END + tail, encoding="utf-8")


def table(bench: test_layouts.Bench) -> str:
    """A line a layout and family: the worst of its requests and ranks; bytes are the most that a rank sent."""
    lines = ["| layout | family | levels | latents | KB sent a rank: denoising | decode |", "|---|---|---|---|---|---|"]
    for layout, family in test_layouts.PAIRS:
        levels, latents, sent, decode = 0, 0.0, 0, 0
        for mix in test_layouts.MIXES[family]:
            alone = bench.alone(family, mix)
            for rank in bench.ranks(layout):
                made = rank[family].mixes[mix]
                levels = max([levels, *map(level_difference, made.pixels, alone.pixels)])
                latents = max([latents, *map(relative_difference, made.latents, alone.latents)])
                sent = max(sent, sum(made.sent.values()))
                decode = max(decode, sum(made.sent_decoding.values()))
        lines.append(f"| {layout} | {family} | {levels} | {latents:.1e} | {sent / 1e3:.0f} | {decode / 1e3:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
