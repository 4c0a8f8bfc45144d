"""Saving a result: which files, in which format, under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from diffgen.errors import InvalidRequest, OutputError
from diffgen.fields import refuse
from diffgen.media import encode, files
from diffgen.media.metadata import Metadata, fits_jpeg, is_clip, of_output
from diffgen.params import NO_LIMITS, ModelSpec, SamplingParams, rational_fps, resolve
from diffgen.result import GenerationResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGE_FORMATS = ("png", "jpeg", "webp")
CLIP_FORMATS = ("mp4", "gif")
LOSSY = ("jpeg", "webp")


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files: where the client writes what it gets; the server never sees these."""

    output_path: Annotated[str, Meta(description="folder for the files")] = "outputs"
    output_file_name: Annotated[
        str | None, Meta(description="name of the files, with or without extension; from prompt and seed when unset")
    ] = None
    output_format: Annotated[
        Literal["png", "jpeg", "webp", "mp4", "gif"] | None,
        Meta(description="png, jpeg or webp for images, mp4 or gif for clips; png and mp4 when unset"),
    ] = None
    output_compression: Annotated[
        int | None,
        Meta(
            description=f"quality of jpeg and webp, 0 (smallest) to 100 (best); {encode.DEFAULT_QUALITY} when unset",
            extra={"min": 0, "max": 100},
        ),
    ] = None
    overwrite: Annotated[bool, Meta(description="replace files of the same name instead of numbering new ones")] = False
    metadata: Annotated[bool, Meta(description="write into the files how they were made")] = True


def check_save(options: SaveOptions, params: SamplingParams, model: ModelSpec | None = None) -> None:
    """What of the options can be known to fail before the work; more with ``model``, whose defaults decide what is
    made. The folder is not looked at: see :func:`diffgen.media.files.check_folder`.

    Raises :class:`OutputError` or ``InvalidRequest``.
    """
    _check_options(options)
    resolved = params
    if model is not None:
        try:
            resolved = resolve(params, model, NO_LIMITS).params
        except InvalidRequest:
            return  # the server refuses it, with its reason
    if model is not None or params.num_frames is not None:
        _check_kind(options, resolved)
    if params.output_type == "latent":
        raise OutputError("latents are not pictures: leave output_path out with output_type='latent'")


def _check_options(options: SaveOptions) -> None:
    """Rules that hold whatever is made."""
    extension = ""
    if options.output_file_name is not None:
        stem, extension = files.split_extension(options.output_file_name)
        files.check_stem(stem)
    named = files.FORMATS.get(extension.lower())
    if named is not None and options.output_format not in (None, named):
        other = f"output_format is {options.output_format}"
        _refuse_name(options.output_file_name, other, f"leave {extension} out, or give output_format={named}")
    if options.output_compression is not None and options.output_format not in LOSSY:
        given = f"output_compression {options.output_compression}"
        rule = f"with output_format {options.output_format or 'unset'}: only {' and '.join(LOSSY)} have a quality"
        refuse("output_compression", f"{given} {rule}; leave it out, or give output_format=jpeg or webp")


def _refuse_name(name: str | None, reason: str, remedy: str) -> None:
    refuse("output_file_name", f"output_file_name {name!r} has another extension: {reason}; {remedy}")


def _check_kind(options: SaveOptions, params: SamplingParams) -> str:
    """The format for what ``params`` make. Raises :class:`InvalidRequest` where the options ask for another."""
    clip = is_clip(params)
    fitting = CLIP_FORMATS if clip else IMAGE_FORMATS
    chosen = options.output_format or fitting[0]
    made = f"a clip of {params.num_frames} frames" if clip else "a still image"
    if chosen not in fitting:
        refuse("output_format", f"output_format {chosen} cannot hold {made}; use {' or '.join(fitting)}")
    extension = files.split_extension(options.output_file_name or "")[1]
    named = files.FORMATS.get(extension.lower(), chosen)
    if named != chosen:
        remedy = f"give output_format={named}" if named in fitting else f"leave .{extension} out"
        _refuse_name(options.output_file_name, f"{made} is saved as {chosen}", remedy)
    longest = encode.MAX_SIDE.get(chosen)
    if longest is not None and max(params.width or 0, params.height or 0) > longest:
        size = f"{params.width}x{params.height}"
        refuse("output_format", f"{chosen} holds at most {longest} pixels a side, not {size}; use {fitting[0]}")
    if chosen == "gif" and (params.fps or 0) > encode.GIF_MAX_FPS:
        rule = f"a GIF shows at most {encode.GIF_MAX_FPS} frames a second"
        refuse("fps", f"fps {params.fps:g}: {rule}; use a lower fps, or output_format=mp4")
    if chosen == "mp4" and params.width is not None and params.height is not None:
        encode.check_mp4(params.width, params.height)
    return chosen


def save_result(result: GenerationResult, options: SaveOptions, written: Iterable[Path] = ()) -> list[Path]:
    """Write one file an output and note them in ``result.paths``, and what cannot be kept in ``result.warnings``.

    ``written`` are files that are kept even with ``overwrite``, such as those of the same call. Raises
    :class:`OutputError`, or :class:`InvalidRequest` for a format that does not fit.
    """
    folder = files.check_folder(Path(options.output_path))
    pixels = result.pixels
    chosen = _check_kind(options, result.params)
    warnings = _gif_warnings(result.params.fps, pixels.shape[1]) if chosen == "gif" else []
    chosen_stem, extension = files.split_extension(options.output_file_name or "")
    kept = set(written)
    for index, (clip, seed) in enumerate(zip(pixels, result.seeds, strict=True)):
        if options.output_file_name is None:
            stem = f"{files.slug(result.params.prompt)}_{seed}_{index:02d}"
        else:
            stem = chosen_stem + (f"_{index:02d}" if len(pixels) > 1 else "")
        metadata = of_output(result.params, seed, result.model) if options.metadata else None
        if metadata is not None and chosen == "jpeg" and not fits_jpeg(metadata):
            metadata = None
            warnings.append("the metadata is too long for a JPEG and was left out; use png or webp to keep it")
        save = _writer(chosen, clip, result.params, options, metadata)
        suffix = extension or chosen
        overwrite = options.overwrite and folder / f"{stem}.{suffix}" not in kept
        result.paths.append(files.write(folder, stem, suffix, save, overwrite))
        kept.add(result.paths[-1])
    result.warnings += tuple(dict.fromkeys(warnings))
    return result.paths


def _writer(
    chosen: str, clip: NDArray[np.uint8], params: SamplingParams, options: SaveOptions, metadata: Metadata | None
) -> Callable[[Path], None]:
    if chosen in CLIP_FORMATS:
        assert params.fps is not None, "a model of clips has a default fps"
        save_clip = encode.save_gif if chosen == "gif" else encode.save_mp4
        return partial(save_clip, clip, fps=params.fps, metadata=metadata)
    if chosen == "png":
        return partial(encode.save_png, clip[0], metadata=metadata)
    quality = encode.DEFAULT_QUALITY if options.output_compression is None else options.output_compression
    save_picture = encode.save_jpeg if chosen == "jpeg" else encode.save_webp
    return partial(save_picture, clip[0], quality=quality, metadata=metadata)


def _gif_warnings(fps: float | None, frames: int) -> list[str]:
    """A GIF tells time in 1/100 s."""
    assert fps is not None, "a model of clips has a default fps"
    delays = sorted(set(encode.gif_delays(frames, fps)))
    if 100 / rational_fps(fps) == delays[0] and len(delays) == 1:
        return []
    shown = " or ".join(f"{delay / 100:g}" for delay in delays)
    return [f"fps={fps:g}: a GIF tells time in 1/100 s, so that its frames last {shown} s; an mp4 keeps fps exactly"]
