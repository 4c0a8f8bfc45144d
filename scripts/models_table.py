"""The table of model families in docs/models.md, from the registry and the specs of tiny random models.

python scripts/models_table.py          prints it
python scripts/models_table.py --write  puts it into the page
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from families import MAKERS  # noqa: E402

from diffgen.args import ModelArgs  # noqa: E402
from diffgen.params import ModelSpec  # noqa: E402
from pipelines.registry import FAMILIES, SERVED, load_pipeline  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def table() -> str:
    """Markdown: a row a family, the fallback last."""
    rows = ["| family | diffusers pipelines | makes | guidance | also takes |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for family in sorted(set(FAMILIES) - {"fallback"}):
            path = MAKERS[family](Path(folder) / family)
            spec = load_pipeline(path, ModelArgs(model_path=str(path)), torch.device("meta")).spec
            rows.append(_row(family, spec))
    others = "any other text-to-image or text-to-video pipeline"
    rows.append(f"| `fallback` | {others} | as it says | as it says | as it says |")
    return "\n".join(rows)


def _row(family: str, spec: ModelSpec) -> str:
    classes = ", ".join(f"`{name}`" for name, served in SERVED.items() if served == family)
    makes = "clips and images" if spec.frame_stride else "images"
    guidance = "none" if spec.guidance is None else f"`{spec.guidance}`"
    if spec.guidance_needs_negative:
        guidance += " with a negative prompt"
    takes = ", ".join(f"`{name}`" for name in sorted(spec.takes) if name != spec.guidance)
    return f"| `{family}` | {classes} | {makes} | {guidance} | {takes} |"


def with_table(page: str, new: str) -> str:
    """The page with the table between its marks replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into docs/models.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(), table()))
    else:
        print(table())


if __name__ == "__main__":
    main()
