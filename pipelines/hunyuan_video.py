"""HunyuanVideo: text-to-video and, with one frame, text-to-image (diffusers' ``HunyuanVideoPipeline``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

from diffgen.args import ModelArgs
from diffgen.distributed.decode import DecodeParts, DecodeRule
from diffgen.distributed.layout import Layout
from diffgen.distributed.sequence import SequencePlan, without_mask
from diffgen.distributed.tensor import Style, TensorPlan
from diffgen.errors import GenerationError
from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.base import ComposedPipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.schedulers import FLOW_SCHEDULERS, flow_names, make_flow_scheduler
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage

_TAKES = ("true_cfg_scale", "max_sequence_length", "scheduler", "flow_shift")
# Tokens that CLIP reads, whatever the length for Llama.
_CLIP_LENGTH = 77


_COLUMNS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
# The refiner of the text is small and stays whole.
_COLWISE = [
    *(f"{block}.attn.{name}" for block in (_DOUBLE, _SINGLE) for name in _COLUMNS),
    *(f"{_DOUBLE}.{name}.net.0.proj" for name in ("ff", "ff_context")),
    f"{_SINGLE}.proj_mlp",
]
_ROWWISE = [f"{_DOUBLE}.{name}" for name in ("attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2")]
_STYLES: dict[str, Style] = {
    **dict.fromkeys(_COLWISE, "colwise"),
    **dict.fromkeys(_ROWWISE, "rowwise"),
    f"{_SINGLE}.proj_out": "packed_rowwise",
}
_TENSOR_PLAN = TensorPlan(_STYLES, heads={f"{block}.attn": ("heads",) for block in (_DOUBLE, _SINGLE)})
# Tokens lie in the first block's inputs, and their places in the turns that go to every block.
_SEQUENCE_PLAN: SequencePlan = {
    "rope": {index: ContextParallelInput(0, expected_dims=2, split_output=True) for index in (0, 1)},
    "transformer_blocks.0": {
        name: ContextParallelInput(1, expected_dims=3) for name in ("hidden_states", "encoder_hidden_states")
    },
    "proj_out": ContextParallelOutput(1, expected_dims=3),
}


def _split_causal_attention(parts: DecodeParts, module: Any) -> None:
    module.forward = functools.partial(_attend_past, parts, module, module.forward)


def _attend_past(parts: DecodeParts, module: Any, whole: Any, values: torch.Tensor) -> torch.Tensor:
    """As ``HunyuanVideoMidBlock3D`` does for (b, channels, frames, rows, columns).

    A pixel sees those of its frame and of earlier ones, in all rows.
    """
    if not parts.rows:
        return whole(values)  # type: ignore[no-any-return]
    values = module.resnets[0](values)
    for attn, resnet in zip(module.attentions, module.resnets[1:], strict=True):
        if attn is not None:
            pixels = values.permute(0, 2, 3, 4, 1)
            normed = attn.group_norm(pixels.flatten(1, 3).transpose(1, 2)).transpose(1, 2).view(pixels.shape)
            query = attn.to_q(normed)
            keys = parts.gather_rows(torch.cat([attn.to_k(normed), attn.to_v(normed)], dim=-1), 2)
            frames = [
                torch.arange(each.shape[1], device=values.device).repeat_interleave(each.shape[2:4].numel())
                for each in (query, keys)
            ]
            query, key, value = (
                each.flatten(1, 3).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
                for each in (query, *keys.chunk(2, dim=-1))
            )
            seen = frames[1] <= frames[0][:, None]
            found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            found = attn.to_out[0](found.transpose(1, 2).flatten(2)).view(pixels.shape) + pixels
            values = (found / attn.rescale_output_factor).permute(0, 4, 1, 2, 3)
        values = resnet(values)
    return values


class HunyuanVideoPipeline(ComposedPipelineBase):
    """Llama's text in a template and CLIP's pooled text, a DiT over (frames, height, width) patches, a causal VAE.

    Distilled models take ``guidance_scale`` as an input. Classifier-free guidance is ``true_cfg_scale`` and needs a
    negative prompt.
    """

    serves: ClassVar[tuple[str, ...]] = ("HunyuanVideoPipeline",)
    tensor_plans: ClassVar[dict[str, TensorPlan]] = {"transformer": _TENSOR_PLAN}
    sequence_plan: ClassVar[SequencePlan | None] = _SEQUENCE_PLAN
    decode_rules: ClassVar[dict[str, DecodeRule]] = {"HunyuanVideoMidBlock3D": _split_causal_attention}

    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device, layout: Layout | None = None) -> None:
        super().__init__(index, model, device, layout)
        if self.layout.attention is not None:
            for blocks in (_DOUBLE, _SINGLE):
                without_mask(self.pipe.transformer, blocks)

    def make_stages(self) -> Sequence[PipelineStage]:
        stages = (TextEncodingStage, TimestepStage, LatentPreparationStage, DenoisingStage, DecodingStage)
        return [stage(self) for stage in stages]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        family = {
            "width": 1280,
            "height": 720,
            "num_frames": 129,
            "fps": 15.0,
            "num_inference_steps": 50,
            "true_cfg_scale": 1.0,
            "max_sequence_length": 256,
        }
        distilled = self.pipe.transformer.config.guidance_embeds
        if distilled:
            family["guidance_scale"] = 6.0
        return ModelSpec(
            name=name,
            family="hunyuan-video",
            defaults=self.defaults(index, family),
            size_multiple=max(16, self.pipe.vae_scale_factor_spatial * self.pipe.transformer.config.patch_size),
            frame_stride=self.pipe.vae_scale_factor_temporal,
            takes=(*_TAKES, *(("guidance_scale",) if distilled else ())),
            guidance="true_cfg_scale",
            guidance_needs_negative=True,
            schedulers=tuple(filter(_takes_sigmas, flow_names())),
            longest_text=self.pipe.text_encoder.config.max_position_embeddings - DEFAULT_PROMPT_TEMPLATE["crop_start"],
        )

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        assert params.max_sequence_length is not None
        dtype = self.pipe.transformer.dtype
        texts = {"prompt": params.prompt}
        if self.is_guided(req):
            texts["negative_prompt"] = params.negative_prompt or ""
        branches = []
        for text in texts.values():
            names = ("encoder_hidden_states", "pooled_projections", "encoder_attention_mask")
            encoded = self.pipe.encode_prompt(text, device=self.device, max_sequence_length=params.max_sequence_length)
            branch = dict(zip(names, (each.to(dtype) for each in encoded), strict=True))
            if params.guidance_scale is not None:
                branch["guidance"] = torch.tensor([params.guidance_scale], dtype=dtype, device=self.device) * 1000.0
            branches.append(branch)
        return tuple(branches), self._warnings(texts, params.max_sequence_length)

    def _warnings(self, texts: dict[str, str], length: int) -> tuple[str, ...]:
        # Without what the template puts behind the text: that is cut first, and nobody misses it.
        head, start = DEFAULT_PROMPT_TEMPLATE["template"].partition("{}")[0], DEFAULT_PROMPT_TEMPLATE["crop_start"]
        llama = {"encoder": "Llama", "template": head + "{}", "start": start, "end_token": False}
        return (
            *self.cut_warnings(self.pipe.tokenizer, texts, length, **llama),
            *self.cut_warnings(self.pipe.tokenizer_2, texts, _CLIP_LENGTH, encoder="CLIP"),
        )

    def make_scheduler(self, req: Req) -> Any:
        return make_flow_scheduler(self.pipe.scheduler, req.params.scheduler, req.params.flow_shift)

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        """Evenly from 1 to 0 before the shift: the model's own schedule, not the scheduler's."""
        assert req.params.num_inference_steps is not None
        sigmas = np.linspace(1.0, 0.0, req.params.num_inference_steps + 1)[:-1]
        scheduler.set_timesteps(sigmas=sigmas, device=self.device)

    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        params, channels = req.params, self.pipe.transformer.config.in_channels
        size = (params.height, params.width, params.num_frames)
        latents: torch.Tensor = self.pipe.prepare_latents(
            req.outputs, channels, *size, torch.float32, self.device, generators
        )
        return latents

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        model = self.pipe.transformer
        if self.layout.attention is not None:
            lengths = branch["encoder_attention_mask"].sum(1, dtype=torch.int).tolist()
            if len(set(lengths)) > 1:
                rows = ({name: values[row : row + 1] for name, values in branch.items()} for row in range(len(lengths)))
                each = zip(torch.split(latents, 1), torch.split(timestep, 1), rows, strict=True)
                return torch.cat([self.denoise(*row, key) for row in each])
            branch = self._without_filling(branch, lengths[0])
        prediction: torch.Tensor = model(latents.to(model.dtype), timestep.float(), return_dict=False, **branch)[0]
        return prediction

    def _without_filling(self, branch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        """Texts as long as they are: attention over split tokens takes no mask for what fills them up."""
        ranks = self.layout.sequence.size
        if length < ranks:
            # A block would take none of a rank's tokens for all of them.
            rule = f"a text of {length} tokens cannot lie on {ranks} ranks"
            raise GenerationError(f"{rule}; write {ranks} tokens or more, or use tp_size", code="unsupported_layout")
        names = ("encoder_hidden_states", "encoder_attention_mask")
        return branch | {name: branch[name][:, :length] for name in names}

    def decode_units(self, req: Req) -> int:
        """One for a short clip, else one a piece of time, as ``AutoencoderKLHunyuanVideo`` cuts it."""
        assert req.latents is not None
        vae, frames = self.pipe.vae, req.latents.shape[2]
        if frames <= vae.tile_sample_min_num_frames // vae.temporal_compression_ratio:
            return 1
        stride = vae.tile_sample_stride_num_frames // vae.temporal_compression_ratio
        return int(-(-(frames - 1) // stride))

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        """As ``_temporal_tiled_decode`` does, with the piece before, which the next is blended with, as the state."""
        vae = self.pipe.vae
        assert req.latents is not None
        latents = req.latents.to(vae.dtype) / vae.config.scaling_factor
        longest, stride = vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames
        ratio, units = vae.temporal_compression_ratio, self.decode_units(req)
        if units > 1:
            start = req.unit * (stride // ratio)
            latents = latents[:, :, start : start + longest // ratio + 1]
        piece = vae.decoder(vae.post_quant_conv(latents))
        if req.unit > 0:
            piece = vae.blend_t(req.decoder, piece[:, :, 1:], longest - stride)
        return piece if units == 1 else piece[:, :, : stride + (req.unit == 0)], piece


def _takes_sigmas(name: str) -> bool:
    kind = getattr(diffusers, FLOW_SCHEDULERS.get(name, name))
    return "sigmas" in inspect.signature(kind.set_timesteps).parameters
