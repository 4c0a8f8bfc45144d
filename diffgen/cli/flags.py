"""Flags from the fields of structs: one table for the command line, Python and the wire."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

AUTO = object()  # a flag that was not given


def add_flags(parser: argparse.ArgumentParser, struct: type[msgspec.Struct], skip: Iterable[str] = ()) -> None:
    """One flag a field, ``--like-this``; its help and default come from the field."""
    group = parser.add_argument_group((struct.__doc__ or "").partition("\n")[0].partition(":")[0].rstrip("."))
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        kind, meta = typing.get_args(hints[field.name])[:2]
        extra = meta.extra or {}
        if field.name in skip or not extra.get("cli", True):
            continue
        names = [f"--{field.name.replace('_', '-')}"]
        if "alias" in extra:
            names.append(f"-{extra['alias']}")
        default = "" if field.default in (None, msgspec.NODEFAULT, False) else f" (default {field.default})"
        group.add_argument(
            *names,
            dest=field.name,
            default=AUTO,
            help=(meta.description + default).replace("%", "%%"),
            **_value_options(kind, field.name),
        )


def _value_options(kind: Any, name: str) -> dict[str, Any]:
    members = [m for m in typing.get_args(kind) if m is not types.NoneType] if _is_union(kind) else [kind]
    for member in members:
        if typing.get_origin(member) is Literal:
            return {"choices": typing.get_args(member)}
        if member is bool:
            return {"action": "store_true"}
    number = {int: int, float: float}.get(members[0])
    if number is None:
        return {"metavar": "TEXT"}
    return {"type": number, "metavar": "N" if number is int else "X"}


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def given(namespace: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of the struct's flags that stand on the command line."""
    values = {field.name: getattr(namespace, field.name, AUTO) for field in msgspec.structs.fields(struct)}
    return {name: value for name, value in values.items() if value is not AUTO}
