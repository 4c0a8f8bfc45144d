"""What tests share: tiny models, one oracle process, and generators that stay open for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from http_server import Server, serving
from oracle import THREADS, Oracle
from processes import leftovers, run_root

from diffgen import DiffGenerator

# One thread a process: tests run several side by side, and threads that wait for each other on a full machine spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_wan(model_folder: Path) -> Path:
    """Folder of a random Wan 2.1 model; nothing may be written into it."""
    return tiny_models.make_tiny_wan(model_folder / "tiny-wan")


@pytest.fixture(scope="session")
def tiny_wan22(model_folder: Path) -> Path:
    """Folder of a random Wan 2.2 model with two experts."""
    return tiny_models.make_tiny_wan22(model_folder / "tiny-wan22")


@pytest.fixture(scope="session")
def tiny_wan22_5b(model_folder: Path) -> Path:
    """Folder of a random model like Wan 2.2 TI2V 5B."""
    return tiny_models.make_tiny_wan22_5b(model_folder / "tiny-wan22-5b")


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """Diffusers in another process; started here, so that its imports overlap with those of the ranks."""
    with Oracle() as oracle:
        oracle.start()
        yield oracle


@pytest.fixture(scope="session")
def tiny_generator(tiny_wan: Path) -> Iterator[DiffGenerator]:
    """One rank with :func:`tiny_wan`, shared: a test must leave no request behind."""
    with DiffGenerator.from_pretrained(str(tiny_wan), device="cpu", dtype="float32", threads=THREADS) as generator:
        yield generator


@pytest.fixture(scope="session")
def bundled_generator() -> Iterator[DiffGenerator]:
    """One rank with the bundled model, shared: a test must leave no request behind."""
    with DiffGenerator.from_pretrained(device="cpu", dtype="float32", threads=THREADS) as generator:
        yield generator


@pytest.fixture(scope="session")
def http_server(tiny_wan: Path) -> Iterator[Server]:
    """``diffgen serve`` with :func:`tiny_wan` and an API key, shared: a test must leave no request behind."""
    limits = ("queue=24", "pixels=65536", "steps=1000", "frames=33", "body=1000000")
    with run_root() as root:
        arguments = [
            str(tiny_wan),
            "--served-model-name",
            "org/tiny-wan,tiny",
            *(f"--limit={limit}" for limit in limits),
        ]
        with serving(root, *arguments, key="open sesame") as server:
            yield server
            assert server.stop() == 0
        assert leftovers(root) == []
