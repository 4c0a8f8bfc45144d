"""A model's name to a folder, and what never goes to the network."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.loading.hub import BUNDLED, resolve_model, unwanted_files, wanted_files

RunPython = Callable[..., subprocess.CompletedProcess[str]]

# Resolves each name given, with every socket call an error that is printed; prints name -> outcome and seconds.
RESOLVE = """
import json, socket, sys, time
def fail(*args, **options):
    print("NETWORK", args, file=sys.stderr)
    raise SystemExit("network used")
from huggingface_hub import snapshot_download  # its import is not what is timed
socket.socket.connect = socket.getaddrinfo = socket.create_connection = fail
from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.loading.hub import resolve_model
found = {}
for name in json.loads(sys.argv[1]):
    began = time.perf_counter()
    try:
        outcome = str(resolve_model(ModelArgs(model_path=name)))
    except ModelError as error:
        outcome = f"{error.code}: {error.message}"
    found[name] = outcome, time.perf_counter() - began
print(json.dumps(found))
"""


def resolve(run_python: RunPython, names: list[str], **env: str) -> dict[str, tuple[str, float]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = run_python(RESOLVE, json.dumps(names), env={**clean, **env})
    assert "NETWORK" not in done.stderr
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, float]] = json.loads(done.stdout)
    return found


def test_no_name_is_the_bundled_model() -> None:
    assert resolve_model(ModelArgs()) == BUNDLED
    assert (BUNDLED / "model_index.json").exists()


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "./org/name", str(tmp_path / "org" / "name"), "org/../org/name/"):
        assert resolve_model(ModelArgs(model_path=name)) == tmp_path / "org" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(ModelArgs(model_path="~/org/name")) == tmp_path / "org" / "name"


def test_names_that_are_no_model_fail_at_once_without_the_network(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    paths = [
        "./nope",
        "/nope",
        "../nope",
        "~/nope",
        "~nobody-here/x",
        "nope",
        "a/b/c",
        "a//b",
        "C:\\models\\x",
        "",
        " ",
    ]
    odd = [
        "-rf",
        "http://host/x",
        "hf://org/name",
        "org/na me",
        "a\nb/c",
        "a\0b",
        "猫" * 300,
        "x" * 5000,
        "org/name@main",
    ]
    ids = ["org/..", "../x", "org/x.git", "ör/ñ", "-a/b", "a--b/c", "a/.b"]
    found = resolve(run_python, [*paths, *odd, *ids, "file"])
    for name, (outcome, seconds) in found.items():
        assert outcome.startswith("model_not_found: "), name
        assert seconds < 0.5, name
        assert len(outcome) < 700, name
    for name in ("./nope", "/nope", "nope"):
        assert f"no such directory: {name!r}" in found[name][0]
        assert "org/name" in found[name][0], "what a model may be"
    assert "is a file" in found["file"][0]


def _cache(home: Path, repo: str, revision: str = "main") -> Path:
    """The Hub's cache as it lies on disk after a download."""
    root = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text(snapshot.name)
    (snapshot / "model_index.json").write_text("{}")
    return snapshot


def test_a_cached_model_is_found_offline_without_the_network(run_python: RunPython, tmp_path: Path) -> None:
    snapshot = _cache(tmp_path, "org/name")
    found = resolve(run_python, ["org/name"], HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found["org/name"][0] == str(snapshot)


def test_a_model_that_is_not_cached_says_that_we_are_offline(run_python: RunPython, tmp_path: Path) -> None:
    outcome, seconds = resolve(run_python, ["org/other"], HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")["org/other"]
    assert outcome.startswith("model_not_found: ")
    assert "'org/other'" in outcome
    assert "HF_HUB_OFFLINE is set" in outcome
    assert "not in the cache" in outcome
    assert "give a folder" in outcome
    assert seconds < 0.5


@pytest.mark.parametrize("cached", [True, False])
def test_a_hub_that_cannot_be_reached(run_python: RunPython, tmp_path: Path, cached: bool) -> None:
    """With a copy in the cache it is used; without one the reason is said."""
    snapshot = _cache(tmp_path, "org/name") if cached else None
    code = """
from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.loading.hub import resolve_model
try:
    print(resolve_model(ModelArgs(model_path="org/name")))
except ModelError as error:
    print(error)
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = run_python(code, env={**clean, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert (str(snapshot) if cached else "the Hub cannot be reached") in done.stdout, done.stderr


def test_what_a_proxy_says_is_the_reason(run_python: RunPython, tmp_path: Path) -> None:
    code = """
import os, socket, threading
from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.loading.hub import resolve_model

def refuse():
    while True:
        with proxy.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\\r\\nContent-Length: 0\\r\\n\\r\\n")

proxy = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=refuse, daemon=True).start()
os.environ["HTTPS_PROXY"] = f"http://127.0.0.1:{proxy.getsockname()[1]}"
try:
    resolve_model(ModelArgs(model_path="org/name"))
except ModelError as error:
    print(error.code, error)
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = run_python(code, env={**clean, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "https://hub.invalid"})
    assert "model_not_found cannot get 'org/name'" in done.stdout, done.stderr
    assert "407 Proxy Authentication Required" in done.stdout


def test_an_error_names_the_file_that_was_given(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("")
    with pytest.raises(ModelError, match=r"give the folder that holds model_index\.json"):
        resolve_model(ModelArgs(model_path=str(file)))


REPOSITORY = [
    "model_index.json",
    "model.safetensors",
    "pipeline.py",
    "README.md",
    "tokenizer/spiece.model",
    "tokenizer/chat_template.jinja",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin",
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model.safetensors.index.json",
]


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        (None, {"text_encoder/model.safetensors", "unet/diffusion_pytorch_model-00001-of-00002.safetensors"}),
        (
            "fp16",
            {"text_encoder/model.fp16.safetensors", "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors"},
        ),
    ],
)
def test_one_copy_of_the_weights_is_downloaded(variant: str | None, weights: set[str]) -> None:
    found = set(filter_repo_objects(REPOSITORY, allow_patterns=wanted_files(variant)))
    assert {name for name in found if name.endswith(".safetensors")} == weights
    assert {"model_index.json", "README.md", "text_encoder/config.json"} <= found
    assert {"tokenizer/spiece.model", "tokenizer/chat_template.jinja"} <= found
    assert not {name for name in found if name.endswith((".py", ".bin"))}


@pytest.mark.parametrize("asked", [True, False])
def test_weights_of_a_safety_checker_are_downloaded_only_if_asked_for(asked: bool) -> None:
    files = ["safety_checker/config.json", "safety_checker/model.safetensors", "unet/model.safetensors"]
    patterns = {"allow_patterns": wanted_files(None), "ignore_patterns": unwanted_files(asked)}
    found = set(filter_repo_objects(files, **patterns))
    assert found == set(files) - (set() if asked else {"safety_checker/model.safetensors"})
