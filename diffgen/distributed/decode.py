"""Decoding on several ranks, each with some rows of the latents or some outputs; equal to one rank's whole decode.

Convolutions get a row from the neighbours on either side, normalisation over the picture shares its statistics, and
the attention of the middle block sees the keys of all rows. What the decoder keeps between frames has own rows alone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from diffgen.distributed.axis import AxisGroup, pieces

#: How a module is split, given what each rank has.
DecodeRule = Callable[["DecodeParts", Any], None]
NO_RULES: Mapping[str, DecodeRule] = types.MappingProxyType({})


def why_not_decode(vae: Any, rules: Mapping[str, DecodeRule] = NO_RULES) -> str:
    """Why the decoder of a VAE cannot be split; empty where it can. ``rules`` are a family's own."""
    decoder = getattr(vae, "decoder", None)
    if decoder is None:
        return f"{type(vae).__name__} has no decoder"
    modules = list(decoder.modules())
    # Of a layer that pads for another, the rule is the outer one's.
    inner = [module.conv for module in modules if _repeats(module)]
    ruled = {each for module in modules if type(module).__name__ in rules for each in module.modules()}
    clips = any(isinstance(module, torch.nn.Conv3d) for module in modules)
    for module in modules:
        owns = next(module.parameters(recurse=False), None) is not None and module not in inner
        unruled = owns and _rule(module, rules) is None and not isinstance(module, torch.nn.Linear)
        # The rule for it is for pictures.
        attends = clips and type(module).__name__ == "Attention" and module not in ruled
        if unruled or attends:
            return f"{type(vae).__name__} has a {type(module).__name__}, for which there is no rule"
    return ""


def split_decode(vae: Any, group: AxisGroup, rules: Mapping[str, DecodeRule] = NO_RULES) -> None:
    """Let a VAE's decoder compute this rank's part and give the whole picture on every rank of ``group``."""
    parts = DecodeParts(group)
    for module in list(vae.decoder.modules()):
        rule = _rule(module, rules)
        if rule is not None:
            rule(parts, module)
    vae.decoder.register_forward_pre_hook(parts.split, with_kwargs=True)
    vae.decoder.register_forward_hook(parts.gather)


def _rule(module: torch.nn.Module, rules: Mapping[str, DecodeRule]) -> DecodeRule | None:
    """How a layer with parameters is split; others see a pixel alone. Some families have copies of others' classes."""
    kind = type(module).__name__
    if kind in rules:
        return rules[kind]
    if kind.endswith("CausalConv3d") and (hasattr(module, "_padding") or _repeats(module)):
        return _split_causal
    if kind.endswith("AttentionBlock") and hasattr(module, "to_qkv"):
        return _split_frame_attention
    if isinstance(module, torch.nn.Conv2d) and module.stride == (1, 1):
        return _split_convolution
    if isinstance(module, torch.nn.GroupNorm):
        return _split_norm
    if kind == "Attention" and module.group_norm is not None and module.spatial_norm is None:
        return _split_attention
    if kind.endswith("RMS_norm"):
        return lambda parts, module: None
    return None


def _repeats(module: Any) -> bool:
    """Whether a causal convolution is padded by another layer, which repeats the edges."""
    return hasattr(module, "time_causal_padding") and getattr(module, "pad_mode", "") == "replicate"


class DecodeParts:
    """What each rank has of the present decode: rows of the latents, or outputs where there is one for each rank."""

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self.rows: list[int] = []  # of the latents; empty while rows are not split
        self._outputs: list[int] = []

    def split(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        latents, rest = args[0], args[1:]
        self.rows, self._outputs = [], []
        if len(latents) >= self.group.size:
            self._outputs = pieces(len(latents), self.group.size)
            latents = latents.tensor_split(self.group.size)[self.group.rank]
        elif latents.shape[-2] >= self.group.size:
            self.rows = pieces(latents.shape[-2], self.group.size)
            latents = latents.tensor_split(self.group.size, -2)[self.group.rank]
        # Else there is too little to split, and every rank decodes the whole.
        return (latents, *rest), kwargs

    def gather(self, decoder: Any, args: Any, pixels: torch.Tensor) -> torch.Tensor:
        if self._outputs:
            return self.group.all_gather(pixels, self._outputs, 0)
        return self.gather_rows(pixels, -2)

    def gather_rows(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """All rows of a tensor that has a rank's own along ``dim``, at any resolution."""
        if not self.rows:
            return values
        mine = values.shape[dim]
        sizes = [mine * rows // self.rows[self.group.rank] for rows in self.rows]
        return self.group.all_gather(values, sizes, dim % values.dim())

    def with_neighbours(self, values: torch.Tensor, repeat: bool = False) -> torch.Tensor:
        """(..., rows, columns) with a row more on either side: the neighbour's, or at the picture's edge zeros, or the
        last row once more."""
        edge = torch.zeros_like(values[..., :1, :])
        above, below = (values[..., :1, :], values[..., -1:, :]) if repeat else (edge, edge)
        if self.rows:
            rank, last = self.group.rank, self.group.size - 1
            parts = [values.new_empty(0)] * self.group.size
            shapes: list[tuple[int, ...]] = [(0,)] * self.group.size
            if rank > 0:
                parts[rank - 1], shapes[rank - 1] = values[..., :1, :], tuple(edge.shape)
            if rank < last:
                parts[rank + 1], shapes[rank + 1] = values[..., -1:, :], tuple(edge.shape)
            received = self.group.all_to_all(parts, shapes)
            above = received[rank - 1] if rank > 0 else above
            below = received[rank + 1] if rank < last else below
        return torch.cat([above, values, below], dim=-2)


def _split_convolution(parts: DecodeParts, module: torch.nn.Conv2d) -> None:
    if module.kernel_size[0] == 1:
        return
    assert module.kernel_size[0] == 3
    assert module.padding[0] == 1
    module.padding = (0, module.padding[1])  # type: ignore[assignment]
    module.register_forward_pre_hook(lambda module, args: (parts.with_neighbours(args[0]), *args[1:]))


def _split_causal(parts: DecodeParts, module: Any) -> None:
    """A convolution over frames too; past frames may come beside the present ones."""
    repeat = _repeats(module)
    padding = "time_causal_padding" if repeat else "_padding"
    left, right, top, bottom, *frames = getattr(module, padding)
    if (top, bottom) == (0, 0):
        return
    assert (top, bottom) == (1, 1)
    setattr(module, padding, (left, right, 0, 0, *frames))

    def widen(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        present, past = (*args, None)[:2]
        if past is None:
            return (parts.with_neighbours(present, repeat),)
        both = parts.with_neighbours(torch.cat([past, present], dim=2), repeat)
        return both[:, :, past.shape[2] :], both[:, :, : past.shape[2]]

    module.register_forward_pre_hook(widen)


def _split_norm(parts: DecodeParts, module: torch.nn.GroupNorm) -> None:
    module.forward = functools.partial(_group_norm, parts, module, module.forward)  # type: ignore[method-assign]


def _group_norm(parts: DecodeParts, module: torch.nn.GroupNorm, whole: Any, values: torch.Tensor) -> torch.Tensor:
    """Mean and variance of each group over all ranks, from those of each (Chan et al., 1979)."""
    if not parts.rows:
        return whole(values)  # type: ignore[no-any-return]
    grouped = values.float().reshape(len(values), module.num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0)
    moments = parts.group.all_gather(torch.stack([mean, variance])[None], [1] * parts.group.size, 0)
    weights = torch.tensor(parts.rows, device=values.device).div(sum(parts.rows)).view(-1, 1, 1)
    mean = (weights * moments[:, 0]).sum(0)
    variance = (weights * (moments[:, 1] + (moments[:, 0] - mean) ** 2)).sum(0)
    normed = (grouped - mean[..., None]) * (variance[..., None] + module.eps).rsqrt()
    shape = (1, -1, *[1] * (values.dim() - 2))
    normed = normed.view(values.shape) * module.weight.view(shape) + module.bias.view(shape)
    return normed.to(values.dtype)


def _split_attention(parts: DecodeParts, module: Any) -> None:
    module.set_processor(_RowAttention(parts, module.processor))


class _RowAttention:
    """A processor: as ``AttnProcessor2_0`` for (b, channels, rows, columns), with the keys of all rows."""

    def __init__(self, parts: DecodeParts, whole: Any) -> None:
        self._parts, self._whole = parts, whole

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._parts.rows:
            given = (encoder_hidden_states, attention_mask, temb)
            return self._whole(attn, hidden_states, *given)  # type: ignore[no-any-return]
        tokens = attn.group_norm(hidden_states.flatten(2)).transpose(1, 2)
        query = attn.to_q(tokens)
        keys = torch.cat([attn.to_k(tokens), attn.to_v(tokens)], dim=-1)
        key, value = self._parts.gather_rows(keys, 1).chunk(2, dim=-1)
        query, key, value = (each.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for each in (query, key, value))
        found = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        found = attn.to_out[0](found).transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            found = found + hidden_states
        return found / attn.rescale_output_factor  # type: ignore[no-any-return]


def _split_frame_attention(parts: DecodeParts, module: Any) -> None:
    module.forward = functools.partial(_attend_frames, parts, module, module.forward)


def _attend_frames(parts: DecodeParts, module: Any, whole: Any, values: torch.Tensor) -> torch.Tensor:
    """As ``WanAttentionBlock`` does for (b, channels, frames, rows, columns), with the keys of all rows of a frame."""
    if not parts.rows:
        return whole(values)  # type: ignore[no-any-return]
    frames = values.transpose(1, 2).flatten(0, 1)
    query, keys, more = module.to_qkv(module.norm(frames)).chunk(3, dim=1)
    key, value = parts.gather_rows(torch.cat([keys, more], dim=1), -2).chunk(2, dim=1)
    query, key, value = (each.flatten(2).transpose(1, 2)[:, None] for each in (query, key, value))
    found = functional.scaled_dot_product_attention(query, key, value)
    found = module.proj(found[:, 0].transpose(1, 2).reshape(frames.shape))
    return found.unflatten(0, (values.shape[0], -1)).transpose(1, 2) + values  # type: ignore[no-any-return]
