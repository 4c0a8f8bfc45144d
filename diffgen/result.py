"""What a caller gets back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffgen.errors import DiffgenError
from diffgen.params import SamplingParams
from diffgen.request import OutputBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclasses.dataclass(kw_only=True, eq=False)  # two arrays are not simply equal or not
class GenerationResult:
    """The outputs of one request, or the error that it ended with.

    Attributes:
        id: the request's id, as in the server's log.
        params: the parameters with every default filled in; the same parameters give the same pixels again.
        seeds: one seed an output.
        warnings: what was changed or has no effect.
        timings: seconds of each stage, of waiting ("queue") and from arrival to answer ("total").
        peak_memory_mb: the most memory that rank 0 has held: on the device, or resident on a CPU.
        model: name of the model that made it; never a path.
        paths: files written, one an output, when saving was asked for.
        error: None, or why there are no outputs; see ``raise_errors`` of :meth:`DiffGenerator.generate`.
    """

    id: str
    params: SamplingParams
    seeds: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_memory_mb: float = 0.0
    model: str = ""
    paths: list[Path] = dataclasses.field(default_factory=list)
    error: DiffgenError | None = None
    raw: NDArray[Any] | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def from_output(cls, request_id: str, output: OutputBatch, raw: NDArray[Any], model: str = "") -> GenerationResult:
        return cls(
            id=request_id,
            params=output.params,
            seeds=output.seeds,
            warnings=output.warnings,
            timings=output.timings,
            peak_memory_mb=output.peak_memory_mb,
            model=model,
            raw=raw,
        )

    @property
    def seed(self) -> int:
        """Seed of the first output."""
        if self.error is not None:
            raise self.error
        return self.seeds[0]

    @property
    def is_video(self) -> bool:
        return self.params.num_frames not in (None, 1)

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """uint8 (outputs, frames, height, width, 3), the exact values that are saved."""
        if self.error is not None:
            raise self.error
        if self.raw is None or self.params.output_type == "latent":
            raise AttributeError("this result holds latents, not pixels: it was made with output_type='latent'")
        return self.raw

    @property
    def images(self) -> Any:
        """The still images: one PIL image each, or for "np" a float32 array (n, height, width, 3) in [0, 1], for "pt"
        a tensor (n, 3, height, width). For a clip, use :attr:`frames`."""
        if self.is_video:
            raise AttributeError(f"this result holds clips of {self.params.num_frames} frames: use .frames")
        clips = self._converted()
        return [clip[0] for clip in clips] if isinstance(clips, list) else clips[:, 0]

    @property
    def frames(self) -> Any:
        """The clips: a list of PIL images each, or for "np" a float32 array (n, frames, height, width, 3) in [0, 1],
        for "pt" a tensor (n, frames, 3, height, width). A still image is a clip of one frame."""
        return self._converted()

    @property
    def latents(self) -> Any:
        """The final latents of ``output_type="latent"``: a float32 tensor (n, channels, latent frames, h, w), or in
        the form that the model's denoiser takes."""
        import torch

        if self.error is not None:
            raise self.error
        if self.raw is None or self.params.output_type != "latent":
            raise AttributeError("this result holds pixels, not latents: ask for output_type='latent'")
        return torch.from_numpy(self.raw.copy())

    def _converted(self) -> Any:
        pixels = self.pixels
        if self.params.output_type == "pil":
            from PIL import Image

            return [[Image.fromarray(frame) for frame in clip] for clip in pixels]
        import numpy as np

        unit = pixels.astype(np.float32) / 255
        if self.params.output_type == "np":
            return unit
        import torch

        return torch.from_numpy(unit).movedim(-1, -3)
