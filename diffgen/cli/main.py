"""``diffgen``: parse, run a command, turn errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage or parameters, 130 Ctrl-C, 143 SIGTERM. Results go to stdout, all else to
stderr. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import msgspec

import diffgen
from diffgen.args import ModelArgs, RunArgs
from diffgen.cli import serve as serve_command
from diffgen.cli.completion import SHELLS, flags_of, parser_of
from diffgen.cli.flags import add_flags
from diffgen.cli.options import BulkOptions, CallOptions, ConnectOptions
from diffgen.errors import DiffgenError, InvalidRequest
from diffgen.fields import close_name, fields
from diffgen.http.args import HttpArgs, HttpLimits
from diffgen.media.save import SaveOptions
from diffgen.params import Limits, SamplingParams


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As every error of the command line, below the usage."""
        self.print_usage(sys.stderr)
        self.exit(2, f"diffgen: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="diffgen", description="Generate images and clips with diffusion models.")
    parser.add_argument("--version", action="version", version=f"diffgen {diffgen.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="generate and save images or a clip",
        usage="%(prog)s --prompt TEXT [FLAG ...]",
        description="Generate and save images or a clip. Prints the path of each file.",
        allow_abbrev=False,
    )
    generate.add_argument(
        "--config", metavar="FILE", help="flags by their names in YAML or JSON; those of the command line count more"
    )
    struct: type[msgspec.Struct]
    for struct in (SamplingParams, SaveOptions, CallOptions):
        add_flags(generate, struct)
    add_server_flags(generate)
    bulk = commands.add_parser(
        "bulk",
        help="run a file of requests, resumable",
        usage="%(prog)s FILE [FLAG ...]",
        description="Run every request of a file that the manifest does not hold yet. Prints a JSON line an end.",
        allow_abbrev=False,
    )
    add_flags(bulk, BulkOptions)
    bulk.add_argument("requests", metavar="FILE", help="a JSON object of parameters a line; - reads stdin")
    add_server_flags(bulk)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="%(prog)s [MODEL] [FLAG ...]",
        description="Serve a model over HTTP: OpenAI's images and videos, and a page to try it on.",
        allow_abbrev=False,
    )
    serve.add_argument("model", metavar="MODEL", nargs="?", help="as --model-path")
    add_flags(serve, HttpArgs)
    for struct in (ModelArgs, RunArgs):
        add_flags(serve, struct, serve_command.DEFAULTS)
    add_limits(serve, HttpLimits)
    status = commands.add_parser(
        "status",
        help="list what a running server has in work",
        usage="%(prog)s --connect ADDRESS [FLAG ...]",
        description="List the requests that a running server has in work, of every client, and sum up what has ended.",
        allow_abbrev=False,
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    cancel = commands.add_parser(
        "cancel",
        help="cancel a request of a running server",
        usage="%(prog)s ID --connect ADDRESS [FLAG ...]",
        description="End a request of a running server, whoever has sent it.",
        allow_abbrev=False,
    )
    cancel.add_argument("id", metavar="ID", help="the request's id; diffgen status lists them")
    for parser_of_server in (status, cancel):
        add_flags(parser_of_server, ConnectOptions)
    commands.add_parser("env", help="print versions and devices, for bug reports")
    completion = commands.add_parser("completion", help="print a script that completes commands and flags in a shell")
    completion.add_argument("shell", choices=SHELLS)
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """How to serve, or which server to use."""
    for struct in (ConnectOptions, ModelArgs, RunArgs):
        add_flags(parser, struct)
    add_limits(parser, Limits)


def add_limits(parser: argparse.ArgumentParser, kind: type[Limits]) -> None:
    text = f"refuse more than this; repeatable; NAME is {', '.join(fields(kind))}"
    group = parser.add_argument_group("Limits")
    group.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE", help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _mend_streams()
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller's, who may ignore it
        signal.signal(signal.SIGINT, _on_sigint)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where it may fail with a word
        return code
    except InvalidRequest as error:
        _complain(error)
        return 2
    except (DiffgenError, TimeoutError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Mostly of our output: its reader has left, which is no news, or its disk is full.
        if not isinstance(error, BrokenPipeError):
            _complain(error)
        # Writing the rest at exit would only fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _mend_streams() -> None:
    """What is written to a closed stream goes nowhere, and no file or socket gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name must not end what has been made


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = parser_of(parser, arguments.command)
        flag = next((each.partition("=")[0] for each in unknown if each.startswith("--")), "")
        flags = {each.lstrip("-").replace("-", "_"): each for each in flags_of(command)}
        close = close_name(flag.lstrip("-").replace("-", "_"), flags)
        remedy = f"did you mean {flags[close]}?" if close else f"see {command.prog} --help"
        if not flag and "prompt" in flags:
            remedy = f"a prompt stands after --prompt, as one text in quotes; {remedy}"
        command.error(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    command: Any
    if arguments.command == "env":
        from diffgen.cli import env as command
    elif arguments.command == "completion":
        from diffgen.cli.completion import print_script

        return print_script(build_parser(), arguments.shell)
    elif arguments.command == "bulk":
        from diffgen.cli import bulk as command
    elif arguments.command == "serve":
        command = serve_command
    elif arguments.command in ("status", "cancel"):
        from diffgen.cli import server as command
    else:
        from diffgen.cli import generate as command
    code: int = command.run(arguments)
    return code


def _on_sigint(number: int, frame: FrameType | None) -> None:
    # The first cancels and cleans up, which takes as long as the unit in work; the second does not wait for it. The
    # ranks see that this process is gone and end themselves.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    raise KeyboardInterrupt


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # As an exception, so that what is open is closed on the way out.
    raise SystemExit(128 + number)


def _complain(error: Exception) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"diffgen: error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
