"""Train the bundled model `shapes` from nothing, in five stages: vae, text, denoiser, finish, export.

`python scripts/train_shapes.py --work FOLDER --export diffgen/shapes`, with OMP_NUM_THREADS=1 in the environment. It is
seeded, and goes on from the checkpoints in FOLDER when it was stopped. With `--start diffgen/shapes`, an exported
model's autoencoder, text encoder and denoiser are taken as they are, and the finish is run on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shapes_denoiser
import shapes_export
import shapes_parallel
import shapes_text
import shapes_vae
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel


def start_from(
    source: Path, vae: shapes_vae.VaeTask, text: shapes_text.TextTask, denoiser: shapes_denoiser.DenoiserTask
) -> None:
    """Write an exported model's parts as finished checkpoints, where there are none yet."""
    reader, student = text.build(), denoiser.build()
    reader.text.load_state_dict(UMT5EncoderModel.from_pretrained(source / "text_encoder").float().state_dict())
    student.transformer.load_state_dict(
        WanTransformer3DModel.from_pretrained(source / "transformer").float().state_dict()
    )
    parts = ((vae, AutoencoderKLWan.from_pretrained(source / "vae").float()), (text, reader), (denoiser, student))
    for task, model in parts:
        if not shapes_parallel.checkpoint(task.folder, task.name).exists():
            shapes_parallel.write_start(task, model, task.steps)


def main() -> None:
    """Run the stages asked for; each goes on from its checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints and drawn scenes")
    parser.add_argument("--export", type=Path, default=Path("diffgen/shapes"), help="folder of the finished model")
    parser.add_argument("--start", type=Path, help="an exported model to go on from, in place of nothing")
    parser.add_argument("--stages", nargs="+", default=["vae", "text", "denoiser", "finish", "export"])
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    vae = shapes_vae.VaeTask(arguments.work, workers=arguments.workers)
    text = shapes_text.TextTask(arguments.work, workers=arguments.workers)
    denoiser = shapes_denoiser.DenoiserTask(arguments.work, workers=arguments.workers)
    finish = shapes_denoiser.FinishTask(arguments.work, workers=arguments.workers)
    if arguments.start:
        start_from(arguments.start, vae, text, denoiser)
    if "vae" in arguments.stages:
        shapes_parallel.train(vae)
    if "text" in arguments.stages:
        shapes_parallel.train(text)
    if "denoiser" in arguments.stages or "finish" in arguments.stages:
        shapes_denoiser.load_statistics(arguments.work)
    if "denoiser" in arguments.stages:
        shapes_parallel.train(denoiser)
    if "finish" in arguments.stages:
        if not shapes_parallel.checkpoint(finish.folder, finish.name).exists():
            shapes_parallel.write_start(finish, shapes_parallel.load_average(denoiser), 0)
        shapes_parallel.train(finish)
    if "export" in arguments.stages:
        shapes_export.export(arguments.work, arguments.export, vae, text, denoiser, finish)


if __name__ == "__main__":
    main()
