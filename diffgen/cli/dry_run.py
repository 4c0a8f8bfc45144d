"""``diffgen generate --dry-run``: what a request comes to, without weights and without work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from diffgen.args import ModelArgs, RunArgs, ServerArgs, check_args
from diffgen.cli.connect import open_generator
from diffgen.cli.settings import Settings, pick
from diffgen.fields import build
from diffgen.media.save import check_save
from diffgen.params import NO_LIMITS, ModelSpec, parse_params, resolve


def run(settings: Settings, prompts: Sequence[str | None]) -> int:
    """Print a JSON object a prompt. Raises what the request would be refused with before it is queued."""
    if settings.server.connect.connect is not None:
        with open_generator(settings.server) as generator:
            spec, pipeline = generator.model, None
    else:
        pipeline = _open_empty(settings)
        spec = pipeline.spec
    for prompt in prompts:
        print(json.dumps(_describe(settings, prompt, spec, pipeline), ensure_ascii=False), flush=True)
    return 0


def _open_empty(settings: Settings) -> Any:
    """The pipeline without weights. Of a Hub id, the configuration is downloaded where the cache lacks it."""
    model = build(ModelArgs, pick(ModelArgs, settings.server.options))
    run = build(RunArgs, pick(RunArgs, settings.server.options))
    check_args(ServerArgs(model=model, run=run, limits=settings.server.limits))
    import torch

    from diffgen.loading.device import default_dtype
    from diffgen.loading.hub import local_folder, resolve_model
    from diffgen.loading.index import read_index
    from diffgen.server.rank import open_pipeline

    folder = local_folder(model)
    if folder is not None:
        read_index(folder, model.variant, model.safety_checker)
    kind = run.device or ("cuda" if torch.cuda.device_count() else "cpu")
    if model.dtype is None:
        name = str(default_dtype(torch.device(kind))).removeprefix("torch.")
        model = msgspec.structs.replace(model, dtype=name)
    return open_pipeline(resolve_model(model, weights=False), model, torch.device("meta"))


def _describe(settings: Settings, prompt: str | None, spec: ModelSpec, pipeline: Any) -> dict[str, Any]:
    params = parse_params({**settings.sampling, "prompt": prompt})
    check_save(settings.save, params, spec)
    limits = NO_LIMITS if pipeline is None else settings.server.limits
    resolved = resolve(params, spec, limits)
    values = {name: value for name, value in msgspec.structs.asdict(resolved.params).items() if value is not None}
    if params.seed is None:
        del values["seed"]  # drawn anew by each run
    memory = None
    if pipeline is not None:
        from diffgen.loading.estimate import estimate_memory

        memory = estimate_memory(pipeline, resolved.params)
    return {
        "model": spec.name,
        "family": spec.family,
        "params": values,
        "warnings": list(resolved.warnings),
        "memory_mb": memory,
    }
