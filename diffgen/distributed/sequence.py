"""Sequence parallelism of diffusers' transformers, from outside.

The only file, beside families with plans of their own, that uses private names of diffusers' context parallelism: the
class's ``_cp_plan``, which says where tokens are split and gathered, ``_parallel_config`` of attention processors, and
the registry of attention backends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from diffgen.distributed.attention import SequenceAttention
from diffgen.distributed.axis import AxisGroup, pieces
from diffgen.errors import GenerationError

# Of the inputs that are split, those whose tokens meet in attention.
_TOKENS = ("hidden_states", "encoder_hidden_states")


#: By names of modules: what is split of their inputs or outputs, and where the tokens are gathered.
SequencePlan = Mapping[str, Any]


def why_not_sequence(kind: type[torch.nn.Module]) -> str:
    """Why a denoiser's tokens cannot be split by its class's own plan; empty where they can."""
    return (
        "" if getattr(kind, "_cp_plan", None) else f"diffusers has no plan for splitting the tokens of {kind.__name__}"
    )


class SplitTokens:
    """One denoiser whose tokens lie on the ranks of ``group``; what its attention processors are told."""

    def __init__(self, group: AxisGroup, attention: SequenceAttention) -> None:
        self._group = group
        self._attention = attention
        self._totals: dict[str, int] = {}

    def split(self, name: str | int, values: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece of an input."""
        if name in _TOKENS:
            self._totals[str(name)] = values.shape[dim]
        return values.tensor_split(self._group.size, dim)[self._group.rank]

    def gather(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of the picture from all ranks."""
        return self._group.all_gather(values, pieces(self._totals["hidden_states"], self._group.size), dim)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, unsupported: bool
    ) -> torch.Tensor:
        split = [pieces(total, self._group.size) for total in self._totals.values()]
        sizes = [sum(each) for each in zip(*split, strict=True)]
        if unsupported or query.shape[1:] != key.shape[1:]:
            rule = "attention with a mask, causality, dropout or grouped heads cannot be split over ranks"
            raise GenerationError(f"{rule}; use another layout, such as tp_size", code="unsupported_layout")
        if query.shape[1] != sizes[self._group.rank]:
            raise RuntimeError(f"{query.shape[1]} tokens in attention, but this rank's pieces have {sizes}")
        return self._attention(query, key, value, sizes, scale)


def split_tokens(
    model: torch.nn.Module, group: AxisGroup, attention: SequenceAttention, plan: SequencePlan | None = None
) -> None:
    """Let a denoiser compute its piece of the tokens, with attention to those of all ranks of ``group``.

    ``plan`` stands for that of the model's class.
    """
    _wrap_native_attention()
    tokens = SplitTokens(group, attention)
    kind: Any = type(model)
    for pattern, part in (kind._cp_plan if plan is None else plan).items():
        for module in _modules(model, pattern):
            _hook(module, part, tokens)
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = tokens
            processor._attention_backend = attention_dispatch.AttentionBackendName.NATIVE


def without_mask(model: torch.nn.Module, pattern: str) -> None:
    """Let modules have no ``attention_mask``, whose every value says yes."""

    def drop(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        given = [None if name == "attention_mask" else value for name, value in zip(names, args, strict=False)]
        return (*given, *args[len(names) :]), {name: kwargs[name] for name in kwargs if name != "attention_mask"}

    for module in _modules(model, pattern):
        module.register_forward_pre_hook(drop, with_kwargs=True)


def _hook(module: torch.nn.Module, plan: Any, tokens: SplitTokens) -> None:
    if isinstance(plan, Mapping):
        inputs = {name: each for name, each in plan.items() if not each.split_output}
        outputs = {name: each for name, each in plan.items() if each.split_output}
        if inputs:
            names = list(inspect.signature(module.forward).parameters)
            module.register_forward_pre_hook(functools.partial(_split_inputs, tokens, inputs, names), with_kwargs=True)
        if outputs:
            module.register_forward_hook(functools.partial(_split_outputs, tokens, outputs))
    else:
        assert isinstance(plan, ContextParallelOutput)
        dim = plan.gather_dim
        module.register_forward_hook(lambda module, args, output: tokens.gather(output, dim))


def _split_inputs(
    tokens: SplitTokens,
    inputs: Mapping[str, ContextParallelInput],
    names: list[str],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, each in inputs.items():
        if _is_split(given.get(name), each):
            given[name] = tokens.split(name, given[name], each.split_dim)
    return tuple(given.pop(name) for name in names[: len(args)]), given


def _split_outputs(
    tokens: SplitTokens, outputs: Mapping[int, ContextParallelInput], module: torch.nn.Module, args: Any, output: Any
) -> Any:
    parts = [output] if isinstance(output, torch.Tensor) else list(output)
    for index, each in outputs.items():
        if _is_split(parts[index], each):
            parts[index] = tokens.split(index, parts[index], each.split_dim)
    return parts[0] if isinstance(output, torch.Tensor) else tuple(parts)


def _is_split(values: Any, plan: ContextParallelInput) -> bool:
    """An input of other dimensions has none of the tokens, such as a timestep for all of them."""
    return isinstance(values, torch.Tensor) and plan.expected_dims in (None, values.dim())


def _modules(model: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    found = [model]
    for name in pattern.split(".") if pattern else []:
        found = [each for module in found for each in (module.children() if name == "*" else [getattr(module, name)])]
    return found


def _wrap_native_attention() -> None:
    """Once a process: calls of a processor that has been told of :class:`SplitTokens` go there."""
    backends = attention_dispatch._AttentionBackendRegistry._backends
    native = attention_dispatch.AttentionBackendName.NATIVE
    original: Callable[..., torch.Tensor] = backends[native]
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
        **rest: Any,
    ) -> torch.Tensor:
        if isinstance(_parallel_config, SplitTokens):
            unsupported = attn_mask is not None or bool(dropout_p) or is_causal or enable_gqa
            return _parallel_config.attend(query, key, value, scale, unsupported)
        rest |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return original(query, key, value, enable_gqa=enable_gqa, _parallel_config=_parallel_config, **rest)

    backends[native] = attend
