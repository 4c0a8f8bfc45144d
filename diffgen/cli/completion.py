"""``diffgen completion``: a script that teaches a shell the commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
_FILES = {"config", "prompt_path", "from_metadata", "token_file", "api_key_file", "requests"}
_FOLDERS = {"output_path", "model_path", "model", "data_path"}


def print_script(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for one of :data:`SHELLS`."""
    import shtab

    for action in _actions(parser):
        if action.dest in _FILES | _FOLDERS:
            action.complete = shtab.FILE if action.dest in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag of a command, as it is typed."""
    return [flag for action in _actions(parser) for flag in action.option_strings]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
