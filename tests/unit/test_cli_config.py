"""Configuration files: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffgen.cli.config import read_config
from diffgen.cli.settings import STRUCTS
from diffgen.errors import InvalidRequest


def config(tmp_path: Path, text: str, name: str = "c.yaml") -> dict[str, Any]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_config(tmp_path / name, STRUCTS, ["limit"])


YAML = """\
prompt: "no"
negative_prompt: null
n: 2
seed: 0
guidance_scale: 4
num_frames: 5
flow_shift: 1.5
metadata: false
json: True
threads: 1
limit: {steps: 9}
"""
JSON = """{"prompt": "no", "negative_prompt": null, "n": 2, "seed": 0, "guidance_scale": 4, "num_frames": 5,
 "flow_shift": 1.5, "metadata": false, "json": true, "threads": 1, "limit": {"steps": 9}}"""


@pytest.mark.parametrize(("text", "name"), [(YAML, "c.yaml"), (YAML, "c.YML"), (JSON, "c.json"), (JSON, "c.yaml")])
def test_yaml_and_json_say_the_same(tmp_path: Path, text: str, name: str) -> None:
    assert config(tmp_path, text, name) == {
        "prompt": "no",
        "negative_prompt": None,
        "num_outputs_per_prompt": 2,
        "seed": 0,
        "guidance_scale": 4,
        "num_frames": 5,
        "flow_shift": 1.5,
        "metadata": False,
        "json": True,
        "threads": 1,
        "limit": {"steps": 9},
    }


def test_texts_survive(tmp_path: Path) -> None:
    text = 'prompt: |\n  猫 😀 "q"\n  Steps: 9\nnegative_prompt: "no"\noutput_file_name: 2x\n'
    values = config(tmp_path, "\ufeff" + text)
    assert values == {"prompt": '猫 😀 "q"\nSteps: 9\n', "negative_prompt": "no", "output_file_name": "2x"}
    assert config(tmp_path, "") == {}
    assert config(tmp_path, "# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "reason", "param"),
    [
        ("num_infrence_steps: 2", "unknown key 'num_infrence_steps'; did you mean 'num_inference_steps'", None),
        ("num-frames: 2", "unknown key 'num-frames'; did you mean 'num_frames'", None),
        ("config: a.yaml", "unknown key 'config'", None),
        ("output_type: np", "unknown key 'output_type'", None),
        ("1: 2", "unknown key 1", None),
        ("seed: 1\nseed: 2", "'seed' stands there twice", None),
        ("seed: 1\nprompt: a\nseed: 2", "'seed' stands there twice", None),
        ("n: 1\nnum_outputs_per_prompt: 1", "are the same; give one", "num_outputs_per_prompt"),
        ("prompt: no", "line 1: YAML reads no as true or false; quote it", None),
        ("seed: 1\nnegative_prompt: off", "line 2: YAML reads off as true or false", None),
        ("json: yes", "YAML reads yes as true or false; .*write true or false", None),
        ("prompt: true", "prompt is true or false (True), not a text; quote it", "prompt"),
        ("prompt: 12", "prompt is a number (12), not a text; quote it", "prompt"),
        ("prompt: 1.5", "prompt is a number", "prompt"),
        ("prompt: 2024-01-01", "prompt is a date", "prompt"),
        ("prompt: [a, b]", "prompt is a list", "prompt"),
        ("prompt: {a: b}", "prompt is a mapping", "prompt"),
        ("prompt: a: b", "it is not YAML", None),
        ("seed: 010", "line 1: 010: YAML reads it in another base", None),
        ("seed: 0x10", "another base", None),
        ("timeout: 1:30", "1:30: YAML reads it in another base", None),
        ("timeout: 1:30.5", "YAML reads 1:30.5 in base 60", None),
        ("- a", "it holds \\['a'\\]; give a file of NAME: VALUE", None),
        ("prompt: !!python/object:os.system a", "it is not YAML", None),
    ],
)
def test_surprises_are_refused(tmp_path: Path, text: str, reason: str, param: str | None) -> None:
    reason = reason.replace("(", "\\(").replace(")", "\\)")
    with pytest.raises(InvalidRequest, match=f"^config '.*c.yaml': .*{reason}") as caught:
        config(tmp_path, text)
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"seed": 1, "seed": 2}', "'seed' stands there twice"),
        ('{"seed": 1,}', "it is not JSON"),
        ("[]", "it holds \\[\\]"),
        ('{"sede": 1}', "did you mean 'seed'"),
        ('{"prompt": true}', "quote it"),
    ],
)
def test_json_has_the_same_rules(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        config(tmp_path, text, "c.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("prompt: é".encode("latin-1"))
    (tmp_path / "folder.yaml").mkdir()
    for name, reason in (
        ("missing.yaml", "No such file"), ("latin.yaml", "cannot read it: .*utf-8"), ("folder.yaml", "directory"),
        ("c.toml", "extension '.toml'"), ("c", "extension ''"), ("a\0.yaml", "cannot read it"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=reason):
            read_config(tmp_path / name, STRUCTS, [])
