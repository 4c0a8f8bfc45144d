"""Flags, configuration file and metadata together."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffgen.cli.completion import SHELLS, print_script
from diffgen.cli.connect import read_token
from diffgen.cli.main import build_parser
from diffgen.cli.settings import Settings, layered, read_prompts, read_settings
from diffgen.errors import InvalidRequest
from diffgen.media.save import SaveOptions, save_result
from diffgen.params import Limits, SamplingParams
from diffgen.result import GenerationResult


def settings(*arguments: str) -> Settings:
    return read_settings(build_parser().parse_args(["generate", *arguments]))


def write(path: Path, **values: Any) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def saved(tmp_path: Path) -> str:
    """A picture of 64 x 32 pixels, seed 7."""
    params = SamplingParams(prompt="made", width=64, height=32, num_frames=1, num_inference_steps=9, seed=7)
    raw = np.zeros((1, 1, 32, 64, 3), np.uint8)
    result = GenerationResult(id="x", params=params, seeds=(7,), raw=raw, model="tiny")
    return str(save_result(result, SaveOptions(output_path=str(tmp_path)))[0])


def test_the_command_line_counts_more_than_the_file_and_that_more_than_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", prompt="config", seed=3, from_metadata=saved(tmp_path), limit={"steps": 9})
    found = settings("--config", path, "--prompt", "flag", "--quiet")
    assert found.sampling["prompt"] == "flag"
    assert found.sampling["seed"] == 3
    assert (found.sampling["width"], found.sampling["height"]) == (64, 32)
    assert found.sampling["num_inference_steps"] == 9
    assert found.server.limits.steps == 9
    assert found.call.quiet
    assert found.source is not None
    assert found.source.model == "tiny"
    assert settings("--config", path, "--limit", "steps=5").server.limits.steps == 5
    assert settings("--config", path, "--limit", "queue=5").server.limits == Limits(steps=9, queue=5)


def test_metadata_alone_is_a_request(tmp_path: Path) -> None:
    assert settings("--from-metadata", saved(tmp_path)).sampling == {
        "prompt": "made", "width": 64, "height": 32, "num_frames": 1, "num_inference_steps": 9, "seed": 7,
        "num_outputs_per_prompt": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ({"size": "64x32"}, {"width": 16}, {"width": 16, "height": 32}),
        ({"width": 64, "height": 32}, {"size": "16x8"}, {"width": 16, "height": 8}),
        ({"width": 64, "height": 32}, {"size": "auto"}, {"size": "auto"}),
        ({"size": "auto"}, {"width": 16, "height": 8}, {"width": 16, "height": 8}),
        ({"size": "auto"}, {"width": 16}, {"size": "auto", "width": 16}),
        ({"size": "64x32", "width": 64}, {}, {"size": "64x32", "width": 64}),
        ({"num_frames": 5}, {"seconds": 2.0}, {"seconds": 2.0}),
        ({"seconds": 2.0}, {"num_frames": 5}, {"num_frames": 5}),
        ({"prompt": "a"}, {"prompt_path": "b"}, {"prompt_path": "b"}),
        ({"prompt_path": "b"}, {"prompt": "a"}, {"prompt": "a"}),
        ({"seed": 1}, {"seed": 0}, {"seed": 0}),
    ],
)
def test_what_stands_for_the_same_is_not_mixed(
    lower: dict[str, Any], upper: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert layered(lower, upper) == expected


def test_no_metadata() -> None:
    assert settings("--prompt", "a").save.metadata
    assert not settings("--prompt", "a", "--no-metadata").save.metadata


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--connect", "ipc://x", "--threads", "1"], "threads with connect: the server"),
        (["--connect", "ipc://x", "--model-path", "m"], "model_path with connect"),
        (["--connect", "ipc://x", "--limit", "steps=1"], "limit with connect"),
        (["--token-file", "x"], "token_file has no effect without connect"),
        (["--limit", "body=5"], "unknown limit 'body'; known"),
        (["--prompt", "a", "--prompt-path", "b"], "prompt and prompt_path are both given"),
        (["--prompt-path", "missing"], "cannot read prompt_path 'missing': No such file"),
        (["--from-metadata", "missing"], "cannot read 'missing': No such file"),
        (["--config", "missing.yaml"], "cannot read it: No such file"),
        (["--timeout", "-1"], "timeout is -1.0; it must be at least 0"),
        (["--output-compression", "101"], "output_compression is 101"),
    ],
)
def test_mistakes(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        settings(*arguments)


@pytest.mark.parametrize("limit", [5, "steps=5", [5], {"steps": "many"}, {"stepz": 5}])
def test_limits_of_a_file(tmp_path: Path, limit: object) -> None:
    path = write(tmp_path / "c.json", limit=limit)
    with pytest.raises(InvalidRequest, match="limit"):
        settings("--config", path)


def test_prompts_are_the_lines_that_are_not_blank(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffa\r\n\n  \n 猫 \u2028 b \n\x85c".encode())
    assert read_prompts(tmp_path / "p.txt") == ["a", " 猫 \u2028 b ", "\x85c"]
    for content, reason in ((b"\n \n", "no line that is not blank"), (b"\xff", "cannot read .*utf-8")):
        (tmp_path / "p.txt").write_bytes(content)
        with pytest.raises(InvalidRequest, match=reason):
            read_prompts(tmp_path / "p.txt")


def test_token_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("open sesame\n")
    assert read_token(str(tmp_path / "t")) == "open sesame"
    with pytest.raises(InvalidRequest, match="cannot read token_file"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_script(build_parser(), shell) == 0
    script = capsys.readouterr().out
    for word in ("generate", "completion", "output-format", "no-metadata", "num-inference-steps", "webp"):
        assert word in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["generate", "--output-f"], {"--output-file-name", "--output-format"}),
        (["generate", "--output-format", "w"], {"webp"}),
        (["generate", "--config", "my"], {"my.yaml"}),
        (["generate", "--model-path", "my"], {"my-model"}),
        (["comp"], {"completion"}),
    ],
)
def test_completion_works_in_bash(
    typed: list[str], offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").touch()
    (tmp_path / "my-model").mkdir()
    print_script(build_parser(), "bash")
    ask = f"""
COMP_WORDS=(diffgen {" ".join(typed)}); COMP_CWORD={len(typed)}; COMP_LINE="${{COMP_WORDS[*]}}"
$(complete -p diffgen | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${{COMPREPLY[@]}}"
"""
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = set(done.stdout.split())
    assert offered <= found, done.stderr
    assert all(word.startswith(typed[-1]) for word in found)
