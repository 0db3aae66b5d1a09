"""The library of kernels: compiled once, kept by what decides it, and said in words where it can't be had."""

import importlib.util
import shutil
import subprocess
import warnings

import pytest

from postrl.policy import native, ops


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "postrl"


def compiler(path, script: str):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


FAKE = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
"""What a compiler leaves: a file where `-o` says."""


def test_the_second_call_compiles_nothing(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path / "fake", FAKE))
    library = native._library()
    assert library.read_text() == "library\n"
    assert list(cache.iterdir()) == [library]  # the folder that it was built in is gone

    def fail(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", fail)
    assert native._library() == library


def test_what_decides_the_library_decides_its_name(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path / "fake", FAKE))
    found = {native._library()}
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-g"))
    found.add(native._library())
    monkeypatch.setattr(native, "_processor", lambda: "another")
    found.add(native._library())
    changed = tmp_path / "kernels.cc"
    changed.write_bytes(native.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    found.add(native._library())
    monkeypatch.setenv("CXX", compiler(tmp_path / "other", FAKE))
    found.add(native._library())
    assert len(found) == len(list(cache.iterdir())) == 5


def test_without_a_compiler(cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(native.BuildError, match=r"no C\+\+ compiler: install g\+\+ or clang\+\+, .*or set CXX"):
        native._library()
    assert not cache.exists()


def test_ziglang_is_the_last_resort(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert native._compiler()[1:] == ["-m", "ziglang", "c++"]
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert native._compiler() == ["/bin/clang++"]


def test_a_compiler_that_fails(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path / "broken", "echo no such header >&2; exit 1"))
    with pytest.raises(native.BuildError, match=r"(?s)broken .*kernels\.cc .*ended with 1:\nno such header"):
        native._library()
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_is_none(tmp_path, monkeypatch):
    """Root may write anywhere, so not by permissions: a file stands in the place of the folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", compiler(tmp_path / "fake", FAKE))
    with pytest.raises(native.BuildError, match=r"file/postrl must be writable .*set XDG_CACHE_HOME.*Not a directory"):
        native._library()


def test_without_kernels_the_reason_is_said_once(monkeypatch):
    def fail():
        raise native.BuildError("no C++ compiler")

    monkeypatch.setattr(native, "register", fail)
    ops.has_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"XLA's own code: no C\+\+ compiler"):
            assert not ops.has_kernels()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not ops.has_kernels()
    finally:
        ops.has_kernels.cache_clear()


def test_every_target_is_in_the_source():
    text = native.SOURCE.read_text()
    handlers = [line.split("(")[1].split(",")[0] for line in text.splitlines() if line.startswith("XLA_FFI_DEFINE")]
    assert sorted(handlers) == sorted(native.TARGETS)
