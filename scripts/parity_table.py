"""Write the table of docs/parallelism.md: how far each layout is from one rank, by tests/parity/test_layouts.py.

python scripts/parity_table.py [--layouts "tp 2" "ring 2" ...] [--families wan flux ...]

With layouts or families named, the other lines of the table stay as they are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "parity")]

import test_layouts  # noqa: E402
from layouts import Launcher  # noqa: E402
from oracle import level_difference, relative_difference  # noqa: E402

PAGE = ROOT / "docs" / "parallelism.md"
HEAD = ["| layout | family | levels | latents | KB sent a rank: denoising | decode |", "|---|---|---|---|---|---|"]
BEGIN, END = "<!-- parity: written by scripts/parity_table.py -->\n", "<!-- end of parity -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=test_layouts.LAYOUTS, default=list(test_layouts.LAYOUTS))
    parser.add_argument("--families", nargs="+", choices=test_layouts.MODELS, default=list(test_layouts.MODELS))
    options = parser.parse_args()
    pairs = [pair for pair in test_layouts.PAIRS if pair[0] in options.layouts and pair[1] in options.families]
    for layout, (dims, parallel_decode, _) in test_layouts.LAYOUTS.items():
        families = tuple(family for name, family in pairs if name == layout)
        test_layouts.LAYOUTS[layout] = (dims, parallel_decode, families)
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder))
        try:
            made = lines(test_layouts.Bench(launcher, Path(folder)), pairs)
        finally:
            launcher.close()
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, tail = rest.partition(END)
    rows = {tuple(line.split(" | ")[:2]): line for line in [*old.splitlines(), *made]}
    text = "\n".join([*HEAD, *(rows[f"| {layout}", family] for layout, family in test_layouts.PAIRS)])
    PAGE.write_text(f"{head}{BEGIN}{text}\n{END}{tail}", encoding="utf-8")


def lines(bench: test_layouts.Bench, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """One a layout and family: the worst of its requests and ranks; bytes are the most that a rank sent."""
    found = []
    for layout, family in pairs:
        levels, latents, sent, decode = 0, 0.0, 0, 0
        for mix in test_layouts.MIXES[family]:
            alone = bench.alone(family, mix)
            for rank in bench.ranks(layout):
                made = rank[family].mixes[mix]
                levels = max([levels, *map(level_difference, made.pixels, alone.pixels)])
                latents = max([latents, *map(relative_difference, made.latents, alone.latents)])
                sent = max(sent, sum(made.sent.values()))
                decode = max(decode, sum(made.sent_decoding.values()))
        found.append(f"| {layout} | {family} | {levels} | {latents:.1e} | {sent / 1e3:.0f} | {decode / 1e3:.0f} |")
    return found


if __name__ == "__main__":
    main()
