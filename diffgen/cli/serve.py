"""``diffgen serve``."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from diffgen.args import ModelArgs, RunArgs, parse_limits
from diffgen.cli.flags import given
from diffgen.errors import InvalidRequest
from diffgen.fields import build
from diffgen.http.args import HttpArgs, HttpLimits, check_http, read_api_keys
from diffgen.http.listen import listen
from diffgen.loading.hub import local_folder
from diffgen.loading.index import read_index
from diffgen.logs import set_up_logs

#: Flags whose default differs from that of the other commands: a server tells what it answers.
DEFAULTS = {"log_level": "info"}


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop. Returns the exit code. Raises what is wrong before the model is loaded."""
    http = build(HttpArgs, given(arguments, HttpArgs))
    check_http(http)
    limits = parse_limits(arguments.limit, HttpLimits)
    model_options = _model_options(arguments)
    run_options = {**DEFAULTS, **given(arguments, RunArgs)}
    model, runs = build(ModelArgs, model_options), build(RunArgs, run_options)
    folder = local_folder(model)
    if folder is not None:
        read_index(folder, model.variant, model.safety_checker)
    set_up_logs(runs.log_level, runs.log_format, "http")
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # it tells of each start and end
    keys = read_api_keys(http)
    with listen(http) as listener:
        # What it imports takes longer than to see that the port is taken.
        from diffgen.http.server import serve

        return serve(http, keys, limits, model_options | run_options, listener)


def _model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = given(arguments, ModelArgs)
    if arguments.model is None:
        return options
    if options.get("model_path") not in (None, arguments.model):
        both = f"MODEL {arguments.model!r} and model_path {options['model_path']!r} differ"
        raise InvalidRequest(f"{both}; give one of them", param="model_path")
    return {**options, "model_path": arguments.model}
