"""The order of the three packages, and the rules that every file keeps."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffgen.args import ListenArgs, ModelArgs, RunArgs
from diffgen.request import Req

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("diffgen", "stages", "pipelines")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
# Packages that a package may not import at module level.
ABOVE = {"diffgen": {"stages", "pipelines"}, "stages": {"pipelines"}, "pipelines": set[str]()}
# The one upward edge: the rank's, inside the function that builds the pipeline.
RANK = ROOT / "diffgen" / "server" / "rank.py"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node, "." if node.level else (node.module or "").split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_run_one_way_and_are_absolute(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }  # fmt: skip
    for node, package in _imports(tree):
        assert package != ".", f"{_name(path)}:{node.lineno} is relative"  # type: ignore[attr-defined]
        if package in ABOVE[path.relative_to(ROOT).parts[0]]:
            assert path == RANK, f"{_name(path)} imports {package}"
            assert node in inside, f"{_name(path)} imports {package} at module level"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} in {_name(path)}"
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert len([name for name in methods if not name.startswith("_")]) <= 12, f"{node.name} in {_name(path)}"


_UNSAFE_NAMES = {"send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"}
_UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_is_unpickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {package for _, package in _imports(tree)} & _UNSAFE_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in _UNSAFE_NAMES
            assert ast.unparse(node) != "torch.load"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            # multiprocessing's Connection pickles with send() and recv(); send_bytes() and recv_bytes() do not.
            assert node.func.attr != "recv", _name(path)


def test_what_is_given_and_kept_stays_within_bounds() -> None:
    """A field more is a decision, which may ask for one to go."""
    assert len(dataclasses.fields(Req)) <= 20
    assert sum(len(group.__struct_fields__) for group in (ModelArgs, RunArgs, ListenArgs)) <= 40


def test_at_most_three_environment_variables_are_ours() -> None:
    names = {name for path in FILES for name in re.findall(r"""["'](DIFFGEN_\w+)["']""", path.read_text())}
    assert len(names) <= 3, names


def test_no_file_edits_the_import_path() -> None:
    for path in FILES:
        assert not re.search(r"sys\.path\.(insert|append|extend)|sys\.path\s*[+=]", path.read_text()), _name(path)


def test_every_package_is_typed() -> None:
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").exists()] == []


def _loaded(code: str) -> set[str]:
    """Top-level modules that are there after ``code`` in a fresh interpreter."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{code}: {done.stderr}"
    return set(done.stdout.split())


HEAVY = {"torch", "numpy", "diffusers", "transformers", "zmq", "av", "PIL", "msgspec"}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import diffgen", HEAVY),
        ("import diffgen.cli.main", HEAVY - {"msgspec"}),
        ("from diffgen import SamplingParams, DiffgenError", HEAVY - {"msgspec"}),
        ("from diffgen import DiffGenerator", HEAVY - {"msgspec", "zmq"}),
        ("import diffgen.server.rank", HEAVY - {"msgspec"}),
    ],
)
def test_light_imports_stay_light(code: str, absent: set[str]) -> None:
    assert not _loaded(code) & absent


def test_each_package_can_be_imported_first() -> None:
    assert not _loaded("import diffgen.api") & {"stages", "pipelines"}
    assert "pipelines" not in _loaded("import stages.base, stages.text")
    assert _loaded("import pipelines.registry") >= set(PACKAGES)


# A child for each module, forked after the slow imports of other projects, in which ours is the first of our own.
_EACH_FIRST = """
import os, sys
import av, msgspec, PIL.Image, torch, zmq
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
assert not {"diffgen", "stages", "pipelines"} & set(sys.modules)
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            __import__(name)
            first = name.partition(".")[0]
            above = {"diffgen": {"stages", "pipelines"}, "stages": {"pipelines"}, "pipelines": set()}[first]
            assert not above & set(sys.modules), f"{name} brings {above & set(sys.modules)}"
            code = 0
        finally:
            sys.excepthook(*sys.exc_info()) if code else None
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_first_and_brings_nothing_from_above() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
    modules = [module for module in modules if not module.endswith("__main__")]
    command = [sys.executable, "-P", "-c", _EACH_FIRST, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], done.stderr


def test_exports_are_complete() -> None:
    import diffgen

    for name in diffgen.__all__:
        assert getattr(diffgen, name) is not None
    assert set(dir(diffgen)) >= {"DiffGenerator", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = diffgen.Nothing
