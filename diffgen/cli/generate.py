"""``diffgen generate``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from diffgen.api import DiffGenerator
from diffgen.args import ModelArgs, RunArgs, parse_limits
from diffgen.cli.flags import given
from diffgen.cli.progress import ProgressBar
from diffgen.fields import build
from diffgen.media.save import SaveOptions, check_save
from diffgen.params import SamplingParams, parse_params
from diffgen.result import GenerationResult


def run(arguments: argparse.Namespace) -> int:
    """Generate one prompt's outputs and print a line for each file."""
    # What can be wrong without a model is found before it is loaded.
    params = parse_params(given(arguments, SamplingParams))
    save = build(SaveOptions, given(arguments, SaveOptions))
    check_save(save, params)
    limits = parse_limits(arguments.limit)
    options: dict[str, Any] = {}
    for group in (ModelArgs, RunArgs):
        options |= given(arguments, group)
    with DiffGenerator.from_pretrained(limits=limits, **options) as generator, ProgressBar(arguments.quiet) as bar:
        result = generator.generate(
            callback=bar, timeout=arguments.timeout, **msgspec.structs.asdict(save), **given(arguments, SamplingParams)
        )
    if not arguments.quiet:
        for warning in result.warnings:
            print(f"diffgen: warning: {warning}", file=sys.stderr)
    for path, seed in zip(result.paths, result.seeds, strict=True):
        print(json.dumps(_as_json(result, path, seed), ensure_ascii=False) if arguments.json else path, flush=True)
    return 0


def _as_json(result: GenerationResult, path: Path, seed: int) -> dict[str, Any]:
    return {
        "path": str(path),
        "seed": seed,
        "id": result.id,
        "params": {name: value for name, value in msgspec.structs.asdict(result.params).items() if value is not None},
        "warnings": list(result.warnings),
        "timings": {stage: round(seconds, 6) for stage, seconds in result.timings.items()},
        "peak_memory_mb": round(result.peak_memory_mb, 1),
    }
