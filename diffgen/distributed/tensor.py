"""Tensor parallelism: each rank reads its slices of the weights, and one hook a layer puts the results together.

Layers stay plain modules with plain tensors: a column-wise layer computes its share of the outputs, a row-wise one its
part of every output, which the ranks then add.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import safe_open

from diffgen.distributed.axis import AxisGroup
from diffgen.distributed.dims import divisors, nearest
from diffgen.errors import ModelError
from diffgen.loading.index import refuse_lacking

Style = Literal["colwise", "rowwise", "packed_rowwise", "norm"]


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """How one class of models is cut. Keys are names of modules, in which ``*`` stands for a number.

    Attributes:
        styles: "colwise": a linear layer's outputs, or an embedding's columns; "rowwise": its inputs; "packed_rowwise":
            its inputs, which are the outputs of several column-wise layers side by side; "norm": a root mean square
            over all heads.
        heads: attributes that count heads or what grows with them, and are divided as well.
    """

    styles: Mapping[str, Style]
    heads: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def class_plan(kind: type[torch.nn.Module]) -> TensorPlan | None:
    """The plan that a class of diffusers has itself; None where it has none."""
    styles = getattr(kind, "_tp_plan", None)
    if not styles:
        return None
    # What is no text there is a style object for packed inputs.
    texts: dict[str, Style] = {
        name: style if style in ("colwise", "rowwise") else "packed_rowwise" for name, style in styles.items()
    }
    return TensorPlan(texts)


class Stored(Protocol):
    """A tensor that can be sliced before it is read; safetensors' slices are some."""

    def get_shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class _Empty:
    values: torch.Tensor

    def get_shape(self) -> Sequence[int]:
        return self.values.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values[index]


def read_sliced(model: torch.nn.Module, folder: Path, variant: str | None, plan: TensorPlan, group: AxisGroup) -> None:
    """:func:`fill_sliced` with the weights in ``folder``, of which only the slices are read into memory.

    Raises :class:`ModelError` for weights that lack some of the model's, too.
    """
    rename = _renaming(model)
    weights = ((rename(name), stored) for name, stored in stored_weights(folder, variant))
    refuse_lacking(folder, fill_sliced(model, weights, plan, group, str(folder)))


def slice_empty(model: torch.nn.Module, plan: TensorPlan, group: AxisGroup, source: str) -> None:
    """:func:`fill_sliced` of a model that stays without weights."""
    # A tied parameter comes once, as in a file.
    weights = [(name, _Empty(each.detach())) for name, each in model.named_parameters()]
    fill_sliced(model, weights, plan, group, source)


def fill_sliced(
    model: torch.nn.Module, weights: Iterable[tuple[str, Stored]], plan: TensorPlan, group: AxisGroup, source: str
) -> set[str]:
    """Fill a model on the device "meta" with this rank's slices of ``weights``, by name, in its own dtypes.

    Buffers that are stored, and so are no part of a plan, are read whole. Returns the names that ``weights`` lack.

    Raises :class:`ModelError`, naming the ``source``, for a width that does not divide, and for weights of another
    shape than the model's.
    """
    styles = _by_module(model, plan.styles)
    heads = _heads(model, plan)
    _check_widths(model, styles, heads, group)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict(keep_vars=True).items()}
    missing = set(shapes)
    for name, stored in weights:
        if name not in missing:
            continue  # of another head of the model, as its class's own loading ignores it
        missing.discard(name)
        owner, _, kind = name.rpartition(".")
        module, style = model.get_submodule(owner), styles.get(owner)
        if tuple(stored.get_shape()) != shapes[name]:
            rule = f"{name} has the shape {stored.get_shape()}, not {shapes[name]}"
            raise ModelError(f"cannot load {source}: {rule}", code="model_incomplete")
        if kind == "bias" and style in ("rowwise", "packed_rowwise") and group.rank > 0:
            module.register_parameter("bias", None)  # it is added once
            continue
        values = _slice(stored, style, kind, module, group).to(getattr(module, kind).dtype)
        if kind in module._buffers:
            module._buffers[kind] = values
        else:
            module._parameters[kind] = torch.nn.Parameter(values, requires_grad=False)
    tie: Any = getattr(model, "tie_weights", None)  # transformers' models have it
    if tie is not None:
        # A file may have either of two that are tied, or both with values of their own.
        tie(missing_keys=missing)
    for (name, attribute), count in heads.items():
        setattr(model.get_submodule(name), attribute, count // group.size)
    _connect(model, styles, group)
    return missing


def stored_weights(folder: Path, variant: str | None) -> Iterator[tuple[str, Stored]]:
    """Names of the stored tensors, each with a view that can be sliced before it is read."""
    infix = f".{variant}" if variant else ""
    index = next(iter(sorted(folder.glob(f"*.safetensors.index{infix}.json"))), None)
    if index is not None:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [
            path.name
            for path in sorted(folder.glob(f"*{infix}.safetensors"))
            if path.name.count(".") == 1 + bool(variant)
        ]
    for file in files:
        with safe_open(folder / file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                yield name, stored.get_slice(name)


def _renaming(model: torch.nn.Module) -> Callable[[str], str]:
    """How names in files become the model's: those of transformers' models have changed since, or lack a prefix."""
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is None:
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    found = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    own = dict(model.named_parameters(remove_duplicate=False))
    return lambda name: str(rename_source_key(name, found, [], prefix, own)[0])


def _heads(model: torch.nn.Module, plan: TensorPlan) -> dict[tuple[str, str], int]:
    """By module and attribute: what counts heads."""
    return {
        (name, attribute): getattr(model.get_submodule(name), attribute)
        for pattern, attributes in plan.heads.items()
        for name in _names(model, pattern)
        for attribute in attributes
    }


def _check_widths(
    model: torch.nn.Module, styles: Mapping[str, Style], heads: Mapping[tuple[str, str], int], group: AxisGroup
) -> None:
    """Whether all that is cut divides."""
    widths = [(f"{name}.{attribute}", count) for (name, attribute), count in heads.items()]
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        widths += [(f"{name}.weight", width) for width in _cut(style, module, module.weight.shape)[1]]
    odd = next((each for each in widths if each[1] % group.size), None)
    if odd is not None:
        legal = list(divisors(math.gcd(*(width for _, width in widths))))
        rule = f"{odd[0]} is {odd[1]} wide, which does not divide by tp_size {group.size}"
        best = nearest((group.size,), ((each,) for each in legal))[0]
        known = f"legal for all layers: {', '.join(map(str, legal))}; nearest: tp_size {best}"
        raise ModelError(f"{rule}; {known}", code="unsupported_layout")


def _cut(style: Style, module: torch.nn.Module, shape: Sequence[int]) -> tuple[int, list[int]]:
    """Along which dimension a weight of this shape is cut, and the widths there of which each rank has a share."""
    if style == "packed_rowwise":
        # The attention's output, as wide as the layer's own, before what else there is.
        return 1, [shape[0], shape[1] - shape[0]]
    dim = 1 if style == "rowwise" or isinstance(module, torch.nn.Embedding) else 0
    return dim, [shape[dim]]


def _slice(stored: Stored, style: Style | None, kind: str, module: torch.nn.Module, group: AxisGroup) -> torch.Tensor:
    shape = stored.get_shape()
    if style is None or (style in ("rowwise", "packed_rowwise") and kind == "bias"):
        return stored[:] if shape else stored[...]
    dim, widths = _cut(style, module, shape)
    parts, start = [], 0
    for width in widths:
        own = width // group.size
        first = start + group.rank * own
        cut = slice(first, first + own)
        parts.append(stored[cut] if dim == 0 else stored[:, cut])
        start += width
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _by_module(model: torch.nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    return {name: style for pattern, style in styles.items() for name in _names(model, pattern)}


def _names(model: torch.nn.Module, pattern: str) -> list[str]:
    parts = pattern.count(".")
    names = (name for name, _ in model.named_modules() if name.count(".") == parts)
    return fnmatch.filter(names, pattern)


def _connect(model: torch.nn.Module, styles: Mapping[str, Style], group: AxisGroup) -> None:
    """What the ranks exchange: a sum behind each row-wise layer, and of squares inside each norm over all heads."""
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        if style in ("rowwise", "packed_rowwise"):
            module.register_forward_hook(lambda module, args, output: group.all_reduce(output))
        elif style == "norm":
            module.forward = _NormOverRanks(module, group)
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape


class _NormOverRanks:
    """``torch.nn.RMSNorm`` of a vector that lies on several ranks."""

    def __init__(self, module: torch.nn.RMSNorm, group: AxisGroup) -> None:
        self._module, self._group = module, group

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        exact, module = values.float(), self._module
        squares = self._group.all_reduce(exact.pow(2).sum(-1, keepdim=True))
        eps = torch.finfo(values.dtype).eps if module.eps is None else module.eps
        normed = exact * torch.rsqrt(squares / (values.shape[-1] * self._group.size) + eps)
        assert module.weight is not None
        return normed.to(values.dtype) * module.weight
