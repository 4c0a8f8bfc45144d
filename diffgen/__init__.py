"""diffgen: a server for diffusion models, used from Python, the command line and other processes.

The exports are lazy, so that ``import diffgen`` costs nothing: see :class:`diffgen.api.DiffGenerator`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffgen.api import DiffGenerator as DiffGenerator
    from diffgen.errors import DiffgenError as DiffgenError
    from diffgen.params import SamplingParams as SamplingParams
    from diffgen.result import GenerationResult as GenerationResult

__version__ = "0.1.0"

_EXPORTS = {
    "DiffGenerator": "diffgen.api",
    "DiffgenError": "diffgen.errors",
    "GenerationResult": "diffgen.result",
    "SamplingParams": "diffgen.params",
}
__all__ = ["DiffGenerator", "DiffgenError", "GenerationResult", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'diffgen' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
