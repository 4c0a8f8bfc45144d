"""``diffgen env``: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import diffgen

_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub", "msgspec", "pyzmq")


def run(arguments: argparse.Namespace) -> int:
    """Print one ``name: value`` line each."""
    print(f"diffgen: {diffgen.__version__}")
    print(f"python: {platform.python_version()} on {platform.platform()}")
    for package in (*_PACKAGES, "Pillow", "av"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package}: {version}")
    import torch

    from diffgen.loading.device import cores

    print(f"cpu: {cores()} cores, {torch.get_num_threads()} threads")
    print(f"cuda: {torch.version.cuda or 'not in this build of torch'}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return 0
