"""The manifest of a bulk run, whatever stands in its place; and a run against a server that is busy."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
from pathlib import Path

import msgspec
import pytest
from processes import DIFFGEN, run_root
from wire_server import Server, draw

from diffgen.cli.manifest import NAME, Entry, Manifest, Run
from diffgen.errors import DeadlineExceeded, DiffgenError, InvalidRequest, OutputError, QueueFull
from diffgen.params import ModelSpec
from diffgen.wire.messages import Failed, Submit

RUN = Run(requests="a.jsonl", sha256="0", seed=1, model="m")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a manifest of two ends."""
    with Manifest(tmp_path) as manifest:
        assert manifest.run is None
        manifest.begin(RUN)
        manifest.note(Entry(line=1, status="done", seed=3, paths=("猫.png",)))
        manifest.note(Entry(line=2, status="failed", code="a", message="b\r\nc"))
    return tmp_path


def test_what_is_noted_is_there_the_next_time(begun: Path) -> None:
    with Manifest(begun) as manifest:
        assert manifest.run == RUN
        assert manifest.ended[1].paths == ("猫.png",)
        assert manifest.ended[2].message == "b\r\nc"
        manifest.note(Entry(line=2, status="done"))
    with Manifest(begun) as manifest:
        assert [entry.status for entry in manifest.ended.values()] == ["done", "done"]


def test_wherever_a_crash_cuts_it_the_whole_lines_count(begun: Path) -> None:
    data = (begun / NAME).read_bytes()
    for size in range(len(data)):
        (begun / NAME).write_bytes(data[:size])
        lines = data[:size].count(b"\n")
        with Manifest(begun) as manifest:
            assert (manifest.run is None) == (lines == 0)
            assert len(manifest.ended) == max(0, lines - 1)
            if lines == 0:
                manifest.begin(RUN)
            manifest.note(Entry(line=7, status="done"))
        with Manifest(begun) as manifest:
            assert 7 in manifest.ended


@pytest.mark.parametrize("content", [b'{"image": 1}', b'{"image": 1}\n', b"\xff\n", b"\n", b'{"requests": 1}\n', b"x"])
def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"no manifest of a bulk run.*output_path"):
        Manifest(tmp_path)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_damaged_line_is_named(begun: Path) -> None:
    data = (begun / NAME).read_bytes().replace(b'"done"', b"\0\0\0\0\0\0")
    (begun / NAME).write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"line 2 of .*manifest.jsonl.*remove it"):
        Manifest(begun)
    assert (begun / NAME).read_bytes() == data


def test_two_at_a_time_are_refused(begun: Path) -> None:
    with Manifest(begun), pytest.raises(OutputError, match="another bulk run"):
        Manifest(begun)


def test_a_folder_in_its_place_is_told(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(OutputError, match=r"cannot open .*manifest.jsonl"):
        Manifest(tmp_path)


def test_a_file_that_cannot_grow_is_told_and_loses_nothing(begun: Path) -> None:
    size = (begun / NAME).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Manifest(begun) as manifest:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
            with pytest.raises(OutputError, match=r"cannot write to .*manifest.jsonl"):
                manifest.note(Entry(line=3, status="done"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.path.getsize(begun / NAME) == size + 5
    with Manifest(begun) as manifest:
        assert set(manifest.ended) == {1, 2}


def test_a_folder_belongs_to_one_model_and_its_users_files_to_them(model: ModelSpec) -> None:
    with run_root() as root:
        server = Server(f"ipc://{root}/s", model, draw)
        text = '{"prompt": "a"}\n'
        (root / "requests.jsonl").write_text(text)
        (root / "out").mkdir()
        with Manifest(root / "out") as manifest:
            digest = hashlib.sha256(text.encode()).hexdigest()
            manifest.begin(msgspec.structs.replace(RUN, sha256=digest, model="other"))
        for name in (".000001_1.1-abcdef01.png", ".000001_notes"):
            (root / "out" / name).touch()
        command = [*DIFFGEN, "bulk", f"{root}/requests.jsonl", "--output-path", f"{root}/out"]
        done = subprocess.run(
            [*command, "--connect", f"ipc://{root}/s"], capture_output=True, text=True, timeout=120, check=False
        )
        server.close()
        assert done.returncode == 2
        assert f"is of the model 'other', and this is {model.name!r}; give 'other', or choose" in done.stderr
        assert sorted(os.listdir(root / "out")) == [".000001_notes", NAME], "half a file is removed"


def test_what_is_in_the_way_is_waited_for(model: ModelSpec) -> None:
    refusals: dict[str, list[DiffgenError]] = {
        "full": [QueueFull("full", retry_after=0.1)] * 2,
        "soon": [DeadlineExceeded("others are first", code="deadline_impossible", retryable=True, retry_after=0.1)],
        "never": [DeadlineExceeded("too much", code="deadline_impossible")],
    }

    def answer(server: Server, client: bytes, message: Submit) -> None:
        left = refusals.get(message.params.prompt)
        if left:
            server.router.send(client, Failed(message.id, left.pop().info()))
        else:
            draw(server, client, message)

    with run_root() as root:
        server = Server(f"ipc://{root}/s", model, answer)
        lines = [json.dumps({"prompt": prompt, "seed": 3, "num_frames": 1}) for prompt in ("a", *refusals)]
        (root / "requests.jsonl").write_text("\n".join(lines))
        command = [*DIFFGEN, "bulk", f"{root}/requests.jsonl", "--output-path", f"{root}/out"]
        done = subprocess.run(
            [*command, "--connect", f"ipc://{root}/s"], capture_output=True, text=True, timeout=120, check=False
        )
        server.close()
        assert done.returncode == 1, done.stderr
        with Manifest(root / "out") as manifest:
            found = {line: (entry.status, entry.code) for line, entry in sorted(manifest.ended.items())}
    assert found == {
        1: ("done", None),
        2: ("done", None),
        3: ("done", None),
        4: ("failed", "deadline_impossible"),
    }
