"""A folder in diffusers layout: what it says it holds, and whether that is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from diffgen.errors import ModelError
from diffgen.params import SamplingParams, nearest_name

_UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class ModelIndex:
    """``model_index.json``: the pipeline's class and its components, name -> (library, class); None means absent."""

    folder: Path
    pipeline_class: str
    components: dict[str, tuple[str, str] | None]

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults of this model from ``diffgen.json`` beside the index, where there is one.

        Raises :class:`ModelError` for a name that is no parameter.
        """
        path = self.folder / "diffgen.json"
        if not path.exists():
            return {}
        values = _read_json(path).get("defaults", {})
        known = {field.name for field in msgspec.structs.fields(SamplingParams)}
        for name in values:
            if name not in known:
                raise ModelError(f"{path}: unknown default {name!r}; {nearest_name(name, known)}")
        try:
            msgspec.convert({"prompt": "", **values}, SamplingParams)
        except msgspec.ValidationError as error:
            raise ModelError(f"{path}: {error}") from None
        return dict(values)


def read_index(folder: Path, variant: str | None) -> ModelIndex:
    """Read and check ``folder``. Raises :class:`ModelError` naming each missing piece."""
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
    missing = [problem for name, kind in components.items() if kind for problem in _missing(folder / name, variant)]
    if missing:
        raise ModelError(f"the model in {folder} is incomplete: {'; '.join(missing)}", code="model_incomplete")
    return ModelIndex(folder, str(data["_class_name"]), components)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}", code="model_incomplete") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object", code="model_incomplete")
    return data


def _missing(folder: Path, variant: str | None) -> list[str]:
    """What one component lacks. Only a component with a config.json has weights."""
    if not folder.is_dir():
        return [f"no folder {folder.name}/"]
    if not any(folder.glob("*.json")):
        return [f"no configuration in {folder.name}/"]
    if not (folder / "config.json").exists():
        return []  # a tokenizer, scheduler or processor
    infix = f".{variant}" if variant else ""
    shards = sorted(folder.glob(f"*.safetensors.index{infix}.json"))
    if shards:
        named = set(_read_json(shards[0]).get("weight_map", {}).values())
        return [f"no {folder.name}/{name}" for name in sorted(named) if not (folder / name).exists()]
    if any(folder.glob(f"*{infix}.safetensors")):
        return []
    if variant and any(folder.glob("*.safetensors")):
        return [f"no weights of variant {variant!r} in {folder.name}/"]
    unsafe = [entry.name for entry in folder.iterdir() if entry.suffix in _UNSAFE]
    if unsafe:
        return [f"{folder.name}/ has only {unsafe[0]}, which can run code; convert it to safetensors"]
    return [f"no *.safetensors in {folder.name}/"]
