"""README's commands and Python blocks, run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def run(command: list[str], cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, cwd=cwd, input=stdin, env=environment, capture_output=True, text=True, timeout=170, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "stdin", "thread"])
def test_python_block(tmp_path: Path, way: str) -> None:
    """As a plain script without a guard, from stdin, and in a thread that ends; a folder pipelines/ changes nothing."""
    (code,) = blocks("python")
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise RuntimeError('the wrong pipelines')\n")
    if way == "thread":
        code = f"import threading\nthread = threading.Thread(target=lambda: exec({code!r}, {{}}))\n"
        code += "thread.start()\nthread.join()\n"
    if way == "stdin":
        done = run([sys.executable], tmp_path, stdin=code)
    else:
        (tmp_path / "readme.py").write_text(code)
        done = run([sys.executable, "readme.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "outputs").glob("*.png"))) == 2
    assert "request_cancelled" in done.stdout


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    make, commands = blocks("sh")
    targets = re.findall(r"^make (\w+)", make, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    for command in commands.strip().splitlines():
        done = run(shlex.split(command), tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert len(list((tmp_path / "outputs").iterdir())) == 5


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
