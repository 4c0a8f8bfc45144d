"""Stable Diffusion XL text-to-image (diffusers' ``StableDiffusionXLPipeline``)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from diffgen.request import Req
from pipelines.stable_diffusion import StableDiffusionPipeline


class StableDiffusionXLPipeline(StableDiffusionPipeline):
    """Two CLIP encoders, whose states stand side by side, the second one's pooled text, and the picture's size.

    No watermark is drawn into the pictures, whether or not the library for it is installed.
    """

    serves: ClassVar[tuple[str, ...]] = ("StableDiffusionXLPipeline",)
    family: ClassVar[str] = "stable-diffusion-xl"
    default_guidance: ClassVar[float] = 5.0
    # In float16 its VAE overflows.
    float32_components: ClassVar[frozenset[str]] = frozenset({"vae"})

    @property
    def _encoders(self) -> list[tuple[Any, Any]]:
        """(tokenizer, text encoder); the first may be absent."""
        pairs = ((self.pipe.tokenizer, self.pipe.text_encoder), (self.pipe.tokenizer_2, self.pipe.text_encoder_2))
        return [(tokenizer, encoder) for tokenizer, encoder in pairs if encoder is not None]

    @property
    def most_clip_skip(self) -> int:
        """Without a skip the last layer is left out already."""
        layers: int = min(encoder.config.num_hidden_layers for _, encoder in self._encoders)
        return layers - 1

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        states, negative_states, pooled, negative_pooled = self.pipe.encode_prompt(
            params.prompt,
            device=self.device,
            do_classifier_free_guidance=self.is_guided(req),
            negative_prompt=params.negative_prompt,
            clip_skip=params.clip_skip,
        )
        # Original size, crop and target size, of a picture that is neither scaled nor cropped: (1, 6).
        size = (params.height, params.width)
        time_ids = torch.tensor([[*size, 0, 0, *size]], dtype=states.dtype, device=self.device)
        branches = tuple(
            {"encoder_hidden_states": text, "text_embeds": pool, "time_ids": time_ids}
            for text, pool in ((states, pooled), (negative_states, negative_pooled))
            if text is not None
        )
        texts = self.encoded_texts(req)
        if params.negative_prompt is None and self.pipe.config.force_zeros_for_empty_prompt:
            # Zeros in place of an encoded text.
            texts.pop("negative_prompt", None)
        warnings = [
            warning
            for tokenizer, _ in self._encoders
            for warning in self.cut_warnings(tokenizer, texts, tokenizer.model_max_length)
        ]
        return branches, tuple(dict.fromkeys(warnings))

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        model = self.pipe.unet
        prediction: torch.Tensor = model(
            latents.to(model.dtype),
            timestep,
            encoder_hidden_states=branch["encoder_hidden_states"],
            added_cond_kwargs={name: branch[name] for name in ("text_embeds", "time_ids")},
            return_dict=False,
        )[0]
        return prediction

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.pipe.vae.config
        latents = super().unscale(latents)
        if config.get("latents_mean") is None or config.get("latents_std") is None:
            return latents
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return latents * std + mean
