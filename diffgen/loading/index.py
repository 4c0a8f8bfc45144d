"""A folder in diffusers layout: what it says it holds, and whether that is there."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from diffgen.errors import InvalidRequest, ModelError
from diffgen.fields import nearest_name
from diffgen.params import SamplingParams, parse_params

# What a request says for itself, or in another way (size is width and height), has no default of the model's.
_DEFAULTS = {field.name for field in msgspec.structs.fields(SamplingParams)} - {
    "prompt",
    "size",
    "seconds",
    "seed",
    "priority",
    "time_limit",
    "output_type",
}
SAFETY_CHECKER = "safety_checker"
_UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class ModelIndex:
    """``model_index.json``: the pipeline's class and its components, name -> (library, class); None means absent.

    ``left_out`` are those that are there for the safety checker alone, where it is not asked for.
    """

    folder: Path
    pipeline_class: str
    components: dict[str, tuple[str, str] | None]
    left_out: frozenset[str] = frozenset()

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults of this model from ``diffgen.json`` beside the index, where there is one.

        Raises :class:`ModelError` for a name that is no parameter.
        """
        path = self.folder / "diffgen.json"
        if not path.exists():
            return {}
        data = _read_json(path)
        values = data.get("defaults", {})
        if not isinstance(values, dict) or set(data) - {"defaults"}:
            rule = 'must be {"defaults": {"NAME": VALUE, ...}} and nothing else'
            raise ModelError(f"{path} has the keys {sorted(data)}; it {rule}", code="model_incomplete")
        for name in values:
            if name not in _DEFAULTS:
                raise ModelError(f"{path}: unknown default {name!r}; {nearest_name(name, _DEFAULTS)}")
        try:
            parse_params({"prompt": "", **values})
        except InvalidRequest as error:
            raise ModelError(f"{path}: {error}") from None
        return dict(values)


def read_index(folder: Path, variant: str | None, safety_checker: bool = False, weights: bool = True) -> ModelIndex:
    """Read and check ``folder``. Raises :class:`ModelError` naming each missing piece.

    What only a safety checker needs may be missing unless it is asked for, and weights where they are not needed.
    """
    path = folder / "model_index.json"
    if not path.exists():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        remedy = "give a folder in diffusers layout"
        raise ModelError(f"{folder} has no model_index.json; {remedy} (found: {found})", code="model_incomplete")
    data = _read_json(path)
    if "_class_name" not in data:
        raise ModelError(f"{path} has no _class_name; it is not a diffusers pipeline", code="model_incomplete")
    components: dict[str, tuple[str, str] | None] = {}
    for name, value in data.items():
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2:
            components[name] = None if value[1] is None else (str(value[0]), str(value[1]))
    if safety_checker and components.get(SAFETY_CHECKER) is None:
        raise ModelError(f"the model in {folder} has no safety checker; leave safety_checker out", code="model_error")
    has_unused = SAFETY_CHECKER in components and not safety_checker
    left_out = frozenset({SAFETY_CHECKER, "feature_extractor"} & set(components)) if has_unused else frozenset()
    needed = [name for name, kind in components.items() if kind and name not in left_out]
    missing = [problem for name in needed for problem in _missing(folder / name, variant, weights)]
    if missing:
        raise ModelError(f"the model in {folder} is incomplete: {'; '.join(missing)}", code="model_incomplete")
    return ModelIndex(folder, str(data["_class_name"]), components, left_out)


def refuse_lacking(folder: Path, names: Iterable[str]) -> None:
    """Raises :class:`ModelError` for ``names`` of weights, if there are any: no file of ``folder`` has them."""
    lacking = sorted(names)
    if lacking:
        which = f"{', '.join(lacking[:5])}{', ...' if lacking[5:] else ''}"
        remedy = "get the model again"
        raise ModelError(f"the weights in {folder} lack {len(lacking)}: {which}; {remedy}", code="model_incomplete")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}", code="model_incomplete") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object", code="model_incomplete")
    return data


def _missing(folder: Path, variant: str | None, weights: bool) -> list[str]:
    """What one component lacks. Only a component with a config.json has weights."""
    if not folder.is_dir():
        return [f"no folder {folder.name}/"]
    if not any(folder.glob("*.json")):
        return [f"no configuration in {folder.name}/"]
    if not (folder / "config.json").exists():
        # A tokenizer, scheduler or processor has a configuration of another name, and no weights.
        return [f"no {folder.name}/config.json"] if any(folder.glob("*.safetensors*")) else []
    if not weights:
        return []
    infix = f".{variant}" if variant else ""
    shards = sorted(folder.glob(f"*.safetensors.index{infix}.json"))
    if shards:
        named = set(_read_json(shards[0]).get("weight_map", {}).values())
        return [f"no {folder.name}/{name}" for name in sorted(named) if not (folder / name).exists()]
    files = {path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors")}
    whole = {name for name in files if not re.search(r"-\d+-of-\d+$", name)}
    present = {name.partition(".")[2] for name in whole}
    if (variant or "") in present:
        return []
    if present:
        wanted = f"weights of variant {variant!r}" if variant else "weights without a variant"
        there = ", ".join(f"variant {name!r}" if name else "no variant" for name in sorted(present))
        return [f"no {wanted} in {folder.name}/ (there: {there})"]
    if files:
        return [f"no *.safetensors.index{infix}.json in {folder.name}/, which names the shards"]
    unsafe = [entry.name for entry in folder.iterdir() if entry.suffix in _UNSAFE]
    if unsafe:
        return [f"{folder.name}/ has only {unsafe[0]}, which can run code; convert it to safetensors"]
    return [f"no *.safetensors in {folder.name}/"]
