"""Flags from the fields of structs: one table for the command line, Python and the wire."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from diffgen.fields import Field, fields

AUTO = object()  # a flag that was not given


def add_flags(
    parser: argparse.ArgumentParser, struct: type[msgspec.Struct], defaults: Mapping[str, object] | None = None
) -> None:
    """One flag a field, ``--like-this``, or ``--no-that`` where the default is true; help comes from the field.

    ``defaults`` are told where a command has its own.
    """
    group = parser.add_argument_group((struct.__doc__ or "").partition("\n")[0].partition(":")[0].rstrip("."))
    for name, field in fields(struct).items():
        if not field.extra.get("cli", True):
            continue
        flag = name.replace("_", "-")
        names = [f"--no-{flag}" if field.default is True else f"--{flag}"]
        if "alias" in field.extra:
            names.append(f"-{field.extra['alias']}")
        text = field.description
        if field.default is True:
            text = f"do not {text}"
        elif field.default not in (None, msgspec.NODEFAULT, False):
            text += f" (default {(defaults or {}).get(name, field.default)})"
        text = text.replace("%", "%%")
        group.add_argument(*names, dest=name, default=AUTO, help=text, **_value_options(field))


def _value_options(field: Field) -> dict[str, Any]:
    (member,) = field.members
    if typing.get_origin(member) is Literal:
        return {"choices": typing.get_args(member)}
    if member is bool:
        return {"action": "store_false" if field.default is True else "store_true"}
    if member in (int, float):
        return {"type": member, "metavar": "N" if member is int else "X"}
    return {"metavar": "TEXT"}


def given(namespace: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of the struct's flags that stand on the command line."""
    values = {name: getattr(namespace, name, AUTO) for name in fields(struct)}
    return {name: value for name, value in values.items() if value is not AUTO}
