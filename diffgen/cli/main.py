"""``diffgen``: parse, run a command, turn errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage or parameters, 130 Ctrl-C, 143 SIGTERM. Results go to stdout, all else to
stderr. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import diffgen
from diffgen.args import ModelArgs, RunArgs
from diffgen.cli.flags import add_flags
from diffgen.errors import DiffgenError, InvalidRequest
from diffgen.media.save import SaveOptions
from diffgen.params import SamplingParams


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diffgen", description="Generate images and clips with diffusion models.")
    parser.add_argument("--version", action="version", version=f"diffgen {diffgen.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="generate and save images or a clip",
        description="Generate and save images or a clip. Prints the path of each file.",
        allow_abbrev=False,
    )
    add_flags(generate, SamplingParams)
    add_flags(generate, SaveOptions)
    output = generate.add_argument_group("Output")
    output.add_argument("--json", action="store_true", help="print one JSON object an output in place of its path")
    output.add_argument("--quiet", action="store_true", help="show no progress and no warnings")
    output.add_argument("--timeout", type=float, metavar="X", help="seconds after which the request is cancelled")
    add_flags(generate, ModelArgs)
    add_flags(generate, RunArgs)
    serving = generate.add_argument_group("Limits")
    serving.add_argument(
        "--limit", action="append", default=[], metavar="NAME=VALUE", help="refuse more than this; repeatable"
    )
    commands.add_parser("env", help="print versions and devices, for bug reports")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return _run(arguments)
    except InvalidRequest as error:
        _complain(error)
        return 2
    except (DiffgenError, TimeoutError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; writing the rest at exit would only fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: argparse.Namespace) -> int:
    command: Any
    if arguments.command == "env":
        from diffgen.cli import env as command
    else:
        from diffgen.cli import generate as command
    code: int = command.run(arguments)
    return code


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # As an exception, so that what is open is closed on the way out.
    raise SystemExit(128 + number)


def _complain(error: Exception) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"diffgen: error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
