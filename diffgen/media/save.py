"""Saving a result: which files, under which names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from diffgen.errors import OutputError
from diffgen.media import encode, files
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the client writes what it gets; the server never sees these."""

    output_path: Annotated[str, Meta(description="folder for the files")] = "outputs"
    output_file_name: Annotated[
        str | None, Meta(description="name of the files, with or without .png or .mp4; from prompt and seed when unset")
    ] = None
    overwrite: Annotated[bool, Meta(description="replace files of the same name instead of numbering new ones")] = False


def check_save(options: SaveOptions, params: SamplingParams) -> None:
    """Everything that can be known to fail before the work. Raises :class:`OutputError` or ``InvalidRequest``."""
    files.check_folder(Path(options.output_path))
    if options.output_file_name is not None:
        files.check_stem(files.without_extension(options.output_file_name))
    if params.output_type == "latent":
        raise OutputError("latents are not pictures: leave output_path out with output_type='latent'")


def save_result(result: GenerationResult, options: SaveOptions) -> list[Path]:
    """Write one PNG or MP4 an output and note them in ``result.paths``. Raises :class:`OutputError`."""
    folder = files.check_folder(Path(options.output_path))
    pixels = result.pixels
    for index, (clip, seed) in enumerate(zip(pixels, result.seeds, strict=True)):
        if options.output_file_name is None:
            stem = f"{files.slug(result.params.prompt)}_{seed}_{index:02d}"
        else:
            stem = files.without_extension(options.output_file_name) + (f"_{index:02d}" if len(pixels) > 1 else "")
        if result.is_video:
            assert result.params.fps is not None, "a model of clips has a default fps"
            write, extension = partial(encode.save_mp4, clip, fps=result.params.fps), "mp4"
        else:
            write, extension = partial(encode.save_png, clip[0]), "png"
        result.paths.append(files.write(folder, stem, extension, write, options.overwrite))
    return result.paths
