"""`envs.sandbox.paths` on plain directories: what it reads, writes and lists, and that no link leads it elsewhere."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox import paths

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "work").mkdir()
    (tmp_path / "secret").write_bytes(b"of the host")
    descriptor = os.open(tmp_path / "work", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def work(tmp_path: Path, top: int) -> Path:
    return tmp_path / "work"


def is_prefix(shorter: str, longer: str) -> bool:
    return longer.startswith(shorter + "/")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PATHS, st.binary(max_size=100), max_size=6))
def test_what_is_written_is_listed_and_read_back(files: dict[str, bytes]):
    names = [path for path in files if not any(is_prefix(path, other) for other in files)]
    kept = {path: files[path] for path in names if all(len(part.encode()) <= 255 for part in path.split("/"))}
    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            paths.write_all(descriptor, kept, None)
            assert sorted(paths.walk(descriptor)) == sorted(kept)
            for path, data in kept.items():
                assert paths.read(descriptor, path, 1000) == data
                assert paths.read(descriptor, path, 10) == data[:10]
            for root, directories, found in os.walk(folder):
                for name in (".", *directories, *found):
                    assert os.stat(os.path.join(root, name)).st_mtime_ns == paths.FIXED_MTIME_NS
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "..", "../secret", "a/../../secret", "a//b", "a/", "./a", ".", "a\0b"]
)
def test_malformed_paths(top: int, path: str):
    with pytest.raises(ValueError, match="expected a relative path"):
        paths.read(top, path, 10)
    with pytest.raises(ValueError, match="expected a relative path"):
        paths.write(top, path, b"", 0o644, None)


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "real", "missing", "link", "."])
def test_a_link_is_never_read_and_never_written_through(top: int, work: Path, target: str):
    (work / "real").write_bytes(b"real")
    (work / "link").symlink_to(target)
    with pytest.raises(FileNotFoundError):
        paths.read(top, "link", 10)
    assert list(paths.walk(top)) == ["real"]
    paths.write(top, "link", b"new", 0o644, None)
    assert not (work / "link").is_symlink()
    assert ((work / "real").read_bytes(), (work / "link").read_bytes()) == (b"real", b"new")
    assert (work.parent / "secret").read_bytes() == b"of the host"


@pytest.mark.parametrize("target", ["..", "/etc", "real", "link", "."])
def test_a_linked_directory_is_never_entered(top: int, work: Path, target: str):
    (work / "real").mkdir()
    (work / "real" / "passwd").write_bytes(b"here")
    (work / "link").symlink_to(target)
    for path in ("link/passwd", "link/secret", "link/new/x"):
        with pytest.raises(FileNotFoundError):
            paths.read(top, path, 10)
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            paths.write(top, path, b"new", 0o644, None)
    assert sorted(paths.walk(top)) == ["real/passwd"]
    assert not (work.parent / "new").exists()
    assert (work.parent / "secret").read_bytes() == b"of the host"


def test_a_hard_link_is_replaced_and_not_written_through(top: int, work: Path):
    (work / "a").write_bytes(b"one")
    os.link(work / "a", work / "b")
    assert sorted(paths.walk(top)) == ["a", "b"]
    paths.write(top, "b", b"two", 0o644, None)
    assert ((work / "a").read_bytes(), (work / "b").read_bytes()) == (b"one", b"two")


def test_special_files_are_not_files(top: int, work: Path):
    os.mkfifo(work / "pipe")
    os.mknod(work / "socket", stat.S_IFSOCK | 0o666)
    (work / "folder").mkdir()
    assert list(paths.walk(top)) == []
    for name in ("pipe", "socket", "folder", "none", "none/none", "pipe/x"):
        with pytest.raises(FileNotFoundError):
            paths.read(top, name, 10)
    paths.write(top, "pipe", b"now a file", 0o600, None)
    assert paths.read(top, "pipe", 100) == b"now a file"
    with pytest.raises(IsADirectoryError):
        paths.write(top, "folder", b"", 0o644, None)
    with pytest.raises(NotADirectoryError):
        paths.write(top, "pipe/x", b"", 0o644, None)


def test_modes_count_for_root_too(top: int, work: Path):
    (work / "closed").write_bytes(b"x")
    (work / "closed").chmod(0o000)
    (work / "dark").mkdir()
    (work / "dark" / "file").write_bytes(b"x")
    (work / "dark").chmod(0o000)
    assert list(paths.walk(top)) == ["closed"]
    with pytest.raises(PermissionError):
        paths.read(top, "closed", 10)
    for call in (lambda: paths.read(top, "dark/file", 10), lambda: paths.write(top, "dark/new", b"", 0o644, None)):
        with pytest.raises(PermissionError):
            call()
    (work / "dark").chmod(0o700)


def test_deep_directories_end_the_listing(top: int, work: Path):
    descriptor = os.dup(top)
    for depth in range(300):
        if depth in (paths.MAX_DEPTH - 1, paths.MAX_DEPTH, 299):
            os.close(os.open(f"at {depth}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.mkdir("d", dir_fd=descriptor)
        child = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(descriptor)
    assert sorted(path.count("/") for path in paths.walk(top)) == [paths.MAX_DEPTH - 1, paths.MAX_DEPTH]
    deep = "/".join(["d"] * paths.MAX_DEPTH) + f"/at {paths.MAX_DEPTH}"
    assert paths.read(top, deep, 10) == b""


def test_names_that_are_not_text_are_left_out(top: int, work: Path):
    for name in (b"\xff", b"line\nbreak", b"\x1b[31m", "é".encode()):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=top))
    assert sorted(paths.walk(top)) == ["\x1b[31m", "line\nbreak", "é"]


def test_sparse_files_are_read_to_the_limit_only(top: int, work: Path):
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert paths.read(top, "sparse", 1000) == bytes(1000)
    assert paths.read(top, "sparse", 0) == b""


def test_mode_and_parents(top: int, work: Path):
    old = os.umask(0o077)
    try:
        paths.write(top, "a/b/run.sh", b"#!/bin/sh\n", 0o755, None)
    finally:
        os.umask(old)
    assert stat.S_IMODE((work / "a/b/run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((work / "a/b").stat().st_mode) == 0o755


def test_no_descriptor_is_left_open(top: int, work: Path):
    (work / "link").symlink_to("..")
    before = set(os.listdir("/proc/self/fd"))
    paths.write(top, "a/b", b"x", 0o644, None)
    paths.read(top, "a/b", 1)
    list(paths.walk(top))
    for path in ("link", "link/x", "none", "a", "a/b/c"):
        with pytest.raises(OSError, match=r".*"):
            paths.read(top, path, 1)
    with pytest.raises(OSError, match=r".*"):
        paths.write(top, "link/x", b"", 0o644, None)
    assert set(os.listdir("/proc/self/fd")) == before
