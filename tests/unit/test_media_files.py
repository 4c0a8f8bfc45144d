"""Names and atomic writing of output files."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffgen.errors import DiffgenError, OutputError
from diffgen.media import files

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("a red circle", "a-red-circle"),
        ("Ünï cødé", "Ünï-cødé"),
        ("e\u0301", "é"),
        ("日本語 テスト", "日本語-テスト"),
        ("", "output"),
        ("   ", "output"),
        ("😀", "output"),
        ("a 😀 b", "a-b"),
        ("..", "output"),
        ("/", "output"),
        ("../../etc/passwd", "etc-passwd"),
        ('a\\b:c*d?e"f<g>h|i', "a-b-c-d-e-f-g-h-i"),
        ("CON", "CON-"),
        ("lpt1", "lpt1-"),
        ("l1\nl2", "l1-l2"),
        ("a\0b", "a-b"),
        ("-rf", "rf"),
        (".hidden", "hidden"),
        ("%s {x} $HOME", "s-x-HOME"),
        ("a.png", "a-png"),
        ("\ud800", "output"),
        ("\u202egnp.exe", "gnp-exe"),
    ],
)
def test_slugs(prompt: str, stem: str) -> None:
    assert files.slug(prompt) == stem


def test_a_slug_is_cut_by_bytes_at_a_whole_character() -> None:
    assert files.slug("猫" * 300) == "猫" * 26
    assert files.slug("a" * 300) == "a" * 80


@given(st.text())
def test_any_prompt_makes_a_plain_name(prompt: str) -> None:
    stem = files.slug(prompt)
    assert 0 < len(stem.encode()) <= files.MAX_SLUG + 1
    assert not stem.startswith(("-", "."))
    assert not set(stem) & set('/\\\0\n:*?"<>|.')
    assert files.check_stem(stem) == stem


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0", "a" * 201, "猫" * 67, "\udcff"])
def test_names_that_are_no_plain_file_name_are_refused(name: str) -> None:
    with pytest.raises(OutputError, match="output_file_name"):
        files.check_stem(name)


@pytest.mark.parametrize("name", ["a", "a b", "-rf", "猫", "a" * 200, "CON", "v1.2"])
def test_names_of_the_users_choice_are_kept(name: str) -> None:
    assert files.check_stem(name) == name


def test_an_extension_in_the_name_is_not_doubled() -> None:
    names = ("a.png", "a.MP4", "a.JPG", "a.b", ".webp", "a.png.gif")
    assert [files.split_extension(name) for name in names] == [
        *[("a", "png"), ("a", "MP4"), ("a", "JPG"), ("a.b", ""), ("", "webp"), ("a.png", "gif")]
    ]


def _save(text: str) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        path.write_text(text)

    return save


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    names = [files.write(tmp_path, "a", "png", _save(str(index))).name for index in range(3)]
    assert names == ["a.png", "a_1.png", "a_2.png"]
    assert [(tmp_path / name).read_text() for name in names] == ["0", "1", "2"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_overwrite_replaces(tmp_path: Path) -> None:
    for text in ("old", "new"):
        files.write(tmp_path, "a", "png", _save(text), overwrite=True)
    assert os.listdir(tmp_path) == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "new"


def test_a_name_taken_by_a_folder_or_a_dangling_link_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    (tmp_path / "a_1.png").symlink_to(tmp_path / "elsewhere")
    assert files.write(tmp_path, "a", "png", _save("x")).name == "a_2.png"
    assert not (tmp_path / "elsewhere").exists()


def test_threads_at_once_get_a_file_each(tmp_path: Path) -> None:
    start = threading.Barrier(4)
    written: list[Path] = []

    def work(text: str) -> None:
        start.wait()
        written.extend(files.write(tmp_path, "a", "png", _save(text)) for _ in range(25))

    threads = [threading.Thread(target=work, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(written)) == len(os.listdir(tmp_path)) == 100
    assert sorted(path.read_text() for path in written) == sorted(str(index) for index in range(4) for _ in range(25))


@pytest.mark.parametrize("stem", ["猫" * 66, "a" * 200])
def test_the_longest_names_fit_the_file_system(tmp_path: Path, stem: str) -> None:
    assert files.write(tmp_path, files.check_stem(stem), "png", _save("x")).exists()


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("the encoder's own")

    with pytest.raises(RuntimeError):
        files.write(tmp_path, "a", "png", fail)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanished_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        files.write(tmp_path / "gone", "a", "png", _save("x"))


@pytest.mark.parametrize("kind", ["png", "mp4"])
def test_a_full_disk_is_said_and_leaves_no_file(run_python: RunPython, tmp_path: Path, kind: str) -> None:
    """A limit on file size stands for it: the write fails in the middle as well."""
    code = f"""
import resource, sys
from pathlib import Path
import numpy as np
from diffgen.errors import OutputError
from diffgen.media import encode, files
pixels = np.random.default_rng(0).integers(0, 255, (9, 128, 128, 3), dtype=np.uint8)
save = (lambda p: encode.save_png(pixels[0], p)) if {kind!r} == "png" else (lambda p: encode.save_mp4(pixels, p, 8))
folder = Path(sys.argv[1])
whole = files.write(folder, "whole", {kind!r}, save).stat().st_size
for limit in (0, 100, whole // 2, whole - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        files.write(folder, "part", {kind!r}, save)
    except OutputError as error:
        assert "too large" in error.message and str(folder) in error.message and "choose another" in error.message
    else:
        raise AssertionError(f"written in spite of a limit of {{limit}}")
"""
    folder = tmp_path / "out"
    folder.mkdir()
    done = run_python(code, str(folder))
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == [f"whole.{kind}"]


def test_enospc_names_the_disk(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OutputError, match="the disk is full; make room") as caught:
        files.write(tmp_path, "a", "png", full)
    assert not caught.value.retryable
    assert "choose another folder" in caught.value.message


def test_folders_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.check_folder(tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.check_folder(Path("~/c")) == tmp_path / "c"


@pytest.mark.parametrize(
    "folder", ["/proc/x", "~nobody of this name/x", "/dev/null", "/dev/full/x", "a\0b", "/" + "x" * 300]
)
def test_folders_that_cannot_be_are_refused_before_the_work(folder: str) -> None:
    with pytest.raises(OutputError, match="choose another folder by output_path") as caught:
        files.check_folder(Path(folder))
    assert repr(folder) in caught.value.message


def test_a_folder_that_is_not_ours_is_refused(run_python: RunPython, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir(mode=0o555)
    code = """
import os, sys
from pathlib import Path
from diffgen.media import files
from diffgen.errors import OutputError
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    files.check_folder(Path(sys.argv[1]))
except OutputError as error:
    print(error)
"""
    for parent in [tmp_path, *tmp_path.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o111)
    done = run_python(code, str(folder))
    assert "cannot write" in done.stdout, done.stderr
    assert "no permission" in done.stdout


def test_errors_are_of_the_tree() -> None:
    assert issubclass(OutputError, DiffgenError)
