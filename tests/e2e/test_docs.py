"""The pages of docs/ and CONTRIBUTING.md: their code runs, and they name what the code has."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import msgspec
import pytest

from diffgen import errors
from diffgen.api import DiffGenerator
from diffgen.args import ListenArgs, ModelArgs, RunArgs
from diffgen.cli.main import build_parser
from diffgen.cli.settings import read_settings
from diffgen.params import Limits, SamplingParams
from diffgen.wire.messages import ClientMessage, ServerMessage

ROOT = Path(__file__).parents[2]
WITH_CODE = ("CONTRIBUTING.md", "docs/models.md", "docs/python.md", "docs/wire.md")
FILE = re.compile(r"# file: (\S+)\n")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)


def section(name: str, heading: str) -> str:
    return read(name).split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_every_page_with_code_is_run() -> None:
    pages = ["CONTRIBUTING.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    assert {page for page in pages if blocks(page, "python")} == {*WITH_CODE, "docs/http.md"}, "http.md needs a server"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    """In order, as one plain script; a block that begins with ``# file: NAME`` is that file beside it."""
    script = ""
    for block in blocks(name, "python"):
        match = FILE.match(block)
        if match is None:
            script += block
        else:
            (tmp_path / match[1]).write_text(block)
    (tmp_path / "page.py").write_text(script)
    done = run([sys.executable, "page.py"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_commands_run(tmp_path: Path) -> None:
    printed = [run(["bash", "-ec", block], tmp_path) for block in blocks("docs/cli.md", "sh")]
    for done in printed:
        assert done.returncode == 0, done.stderr
    path, line, clip, versions = (done.stdout for done in printed)
    assert blocks("docs/cli.md", "text")[0] == path
    (example,) = blocks("docs/cli.md", "json")
    ours, theirs = msgspec.json.decode(example), msgspec.json.decode(line)
    assert ours["timings"].keys() == theirs["timings"].keys()
    stable = ("path", "seed", "params", "warnings")
    assert {name: ours[name] for name in stable} == {name: theirs[name] for name in stable}
    assert ours.keys() == theirs.keys()
    assert clip.endswith(".mp4\n")
    assert versions.startswith("diffgen: ")


def test_the_configuration_file_is_one(tmp_path: Path) -> None:
    (block,) = blocks("docs/cli.md", "yaml")
    (tmp_path / "c.yaml").write_text(block)
    found = read_settings(build_parser().parse_args(["generate", "--config", str(tmp_path / "c.yaml")]))
    assert found.sampling["width"] == 64
    assert not found.save.metadata
    assert found.server.limits.steps == 100


def flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {flag for child in action.choices.values() for flag in flags(child)}
    return found


def test_cli_names_exactly_the_flags_and_limits() -> None:
    prose = re.sub(r"^```.*?^```$", "", read("docs/cli.md"), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", prose.replace("python -m", "")))
    assert named | {"-h"} == flags(build_parser())
    for limit in Limits.__struct_fields__:
        assert f"`{limit}`" in prose


def test_wire_shows_every_message() -> None:
    kinds = {kind.__name__: kind for kind in typing.get_args(ClientMessage | ServerMessage)}
    headings = re.findall(r"^### `(\w+)`$", read("docs/wire.md"), re.MULTILINE)
    assert headings == list(kinds)
    examples = [msgspec.json.decode(block) for block in blocks("docs/wire.md", "json")]
    assert [example["type"] for example in examples] == list(kinds)
    from_clients = {kind.__name__ for kind in typing.get_args(ClientMessage)}
    for example in examples:
        msgspec.convert(example, ClientMessage if example["type"] in from_clients else ServerMessage, str_keys=True)


def test_python_names_every_error_with_its_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \|", section("docs/python.md", "## Errors"), re.MULTILINE)
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert sorted(rows) == sorted(
        (kind.__name__, kind.default_code, "yes" if kind.default_retryable else "no")
        for kind in known
        if issubclass(kind, errors.DiffgenError)
    )


def names(heading: str) -> list[str]:
    """The names in the first column of the tables of a section of docs/python.md."""
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", section("docs/python.md", heading), re.MULTILINE)
    return sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))


def test_python_names_every_option_parameter_and_limit() -> None:
    structs = (ModelArgs, RunArgs, ListenArgs)
    options = {field for struct in structs for field in struct.__struct_fields__}
    named = set(typing.get_type_hints(DiffGenerator.from_pretrained)) - {"options", "return"}
    assert names("## Start: `DiffGenerator.from_pretrained`") == sorted(options | named)
    assert names("## One prompt: `generate`") == sorted({*SamplingParams.__struct_fields__, "n"})
    assert names("## Limits") == sorted(Limits.__struct_fields__)
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", section("docs/python.md", "## Limits"), re.MULTILINE))
    assert {name: int(value) for name, value in rows.items()} == msgspec.structs.asdict(Limits())


def test_links_and_files_exist() -> None:
    for page in (*WITH_CODE, "docs/architecture.md", "docs/cli.md", "docs/http.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", read(page)):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_the_tree_of_files_has_every_module() -> None:
    folders: list[str] = []
    named: set[str] = set()
    lines = re.findall(r"^( *)([\w.]+/?(?:, [\w.]+)*)(?: |$)", blocks("docs/architecture.md", "text")[-1], re.MULTILINE)
    for indent, names in lines:
        for name in names.split(", "):
            folders[len(indent) // 2 :] = [name]
            named.add("".join(folders))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    paths = [path for package in ("diffgen", "stages", "pipelines") for path in (ROOT / package).rglob("*.py")]
    modules = {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}
    assert modules - named == set()
