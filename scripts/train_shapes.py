"""Train the bundled model `shapes` from nothing, in four stages: vae, text, denoiser, export.

`python scripts/train_shapes.py --work FOLDER --export diffgen/shapes`, with OMP_NUM_THREADS=1 in the environment. It is
seeded, and goes on from the checkpoints in FOLDER when it was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shapes_denoiser
import shapes_export
import shapes_parallel
import shapes_text
import shapes_vae


def main() -> None:
    """Run the stages asked for; each goes on from its checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints and encoded scenes")
    parser.add_argument("--export", type=Path, default=Path("diffgen/shapes"), help="folder of the finished model")
    parser.add_argument("--stages", nargs="+", default=["vae", "text", "denoiser", "export"])
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--steps", type=int, default=shapes_denoiser.DenoiserTask.steps, help="of the denoiser")
    parser.add_argument("--no-compile", action="store_true", help="for machines without a C++ compiler")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    vae = shapes_vae.VaeTask(arguments.work, workers=arguments.workers)
    text = shapes_text.TextTask(arguments.work, workers=arguments.workers)
    denoiser = shapes_denoiser.DenoiserTask(
        arguments.work, steps=arguments.steps, workers=arguments.workers, compile=not arguments.no_compile
    )
    if "vae" in arguments.stages:
        shapes_parallel.train(vae)
    if "text" in arguments.stages:
        shapes_parallel.train(text)
    if "denoiser" in arguments.stages:
        shapes_denoiser.load_statistics(arguments.work)
        shapes_parallel.train(denoiser)
    if "export" in arguments.stages:
        shapes_export.export(arguments.work, arguments.export, vae, text, denoiser)


if __name__ == "__main__":
    main()
