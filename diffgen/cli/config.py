"""Configuration files: flags of a command by their fields' names, in YAML or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diffgen.errors import InvalidRequest
from diffgen.fields import Field, fields, nearest_name, shown

_RULE = "a file of NAME: VALUE in YAML (.yaml, .yml) or one JSON object (.json)"


def read_config(path: Path, structs: Iterable[type[msgspec.Struct]], others: Iterable[str]) -> dict[str, Any]:
    """The values of a file, whose keys are fields of ``structs`` (or an alias of one) or ``others``.

    Raises :class:`InvalidRequest` naming the file and the key: for an unknown key, one that stands there twice, and
    a text that YAML reads as something else.
    """
    try:
        values = _parse(path)
        if not isinstance(values, dict):
            raise _wrong(f"it holds {shown(values)}; give {_RULE}")
        return _checked(values, structs, set(others))
    except InvalidRequest as error:
        raise error.prefixed(f"config {str(path)!r}") from None


def _wrong(message: str, key: str = "config") -> InvalidRequest:
    return InvalidRequest(message, code="invalid_config", param=key)


def _parse(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".json"):
        raise _wrong(f"its name has the extension {kind!r}; give {_RULE}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # a ValueError where it is no UTF-8, or the path holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise _wrong(f"cannot read it: {reason}; give {_RULE}") from None
    if kind == ".json":
        try:
            return json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise _wrong(f"it is not JSON: {error}") from None
    return _parse_yaml(text)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises :class:`InvalidRequest` for a key that stands there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _wrong(f"{key!r} stands there twice; give it once", key)
        found[key] = value
    return found


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe, and without YAML 1.1's surprises: each is refused with its line instead of read as something else."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if keys.count(key) > 1:
                    raise _wrong(f"{key!r} stands there twice; give it once", str(key))
            return super().construct_mapping(node, deep)

    def plain_bool(loader: Loader, node: yaml.ScalarNode) -> bool:
        if node.value.lower() not in ("true", "false"):
            remedy = f'quote it for the text, as in "{node.value}", or write true or false'
            raise _wrong(f"line {_line(node)}: YAML reads {node.value} as true or false; {remedy}")
        return bool(loader.construct_yaml_bool(node))

    def plain_int(loader: Loader, node: yaml.ScalarNode) -> int:
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value) is None:
            rule = "YAML reads it in another base"
            raise _wrong(f"line {_line(node)}: {node.value}: {rule}; quote it for the text, or write a plain number")
        return int(node.value)

    def plain_float(loader: Loader, node: yaml.ScalarNode) -> float:
        if ":" in node.value:
            raise _wrong(f"line {_line(node)}: YAML reads {node.value} in base 60; quote it, or write a plain number")
        return float(loader.construct_yaml_float(node))

    Loader.add_constructor("tag:yaml.org,2002:bool", plain_bool)
    Loader.add_constructor("tag:yaml.org,2002:int", plain_int)
    Loader.add_constructor("tag:yaml.org,2002:float", plain_float)
    try:
        found = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise _wrong(f"it is not YAML: {' '.join(str(error).split())}") from None
    return {} if found is None else found


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _checked(values: dict[Any, Any], structs: Iterable[type[msgspec.Struct]], others: set[str]) -> dict[str, Any]:
    known: dict[str, Field] = {
        name: field
        for struct in structs
        for name, field in fields(struct).items()
        if field.extra.get("cli", True)
    }  # fmt: skip
    aliases = {field.extra["alias"]: name for name, field in known.items() if "alias" in field.extra}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key) if isinstance(key, str) else None
        if name is None or name not in known.keys() | others:
            remedy = nearest_name(str(key), [*known, *others])
            raise InvalidRequest(f"unknown key {shown(key)}; {remedy}", code="unknown_parameter", param=str(key))
        if name in found:
            raise _wrong(f"{key!r} and {name!r} are the same; give one of them", name)
        if name in known:
            _check_text(known[name], value)
        found[name] = value
    return found


def _check_text(field: Field, value: object) -> None:
    """A text field with another value is mostly a text without quotes."""
    if str not in field.members or value is None or isinstance(value, str):
        return
    if isinstance(value, list | Mapping):
        raise _wrong(f"{field.name} is a {'list' if isinstance(value, list) else 'mapping'}; give a text", field.name)
    kind = {bool: "true or false", int: "a number", float: "a number"}.get(type(value), f"a {type(value).__name__}")
    raise _wrong(f"{field.name} is {kind} ({shown(value)}), not a text; quote it", field.name)
