"""``diffgen completion``: a script that teaches a shell the commands and flags."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def print_script(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for one of :data:`SHELLS`."""
    import shtab

    print(shtab.complete(parser, shell))
    return 0
