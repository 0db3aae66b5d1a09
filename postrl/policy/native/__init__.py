"""The CPU kernels: `kernels.cc`, compiled for this machine when they are first needed, and called from traced code.

The first use takes some seconds and a C++ compiler: `$CXX`, `c++`, `g++`, `clang++`, or Zig's from the package index
(`pip install -e .[compiler]`). The library is kept in `$XDG_CACHE_HOME/postrl`, by a digest of everything that decides it.

Shapes: see `kernels.cc`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("kernels.cc")
TARGETS = (
    "linear",
    "linear_add",
    "rms_norm",
    "swiglu",
    "log_probability",
    "sample",
    "rope_angles",
    "paged_attention",
    "packed_attention",
)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-w")


class BuildError(Exception):
    """The kernels can't be had on this machine; says why, and what helps."""


@functools.cache
def register() -> None:
    """Builds the kernels, unless that has been done, and makes them known to XLA. BuildError: the reason why not."""
    path = _library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{path} can't be loaded (is its folder mounted noexec? set XDG_CACHE_HOME): {error}"
        ) from error
    for name in TARGETS:
        jax.ffi.register_ffi_target(f"postrl_{name}", jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _library() -> Path:
    compiler = _compiler()
    parts = [SOURCE.read_bytes(), *map(str.encode, (*compiler, *_FLAGS, version("jaxlib"), _processor()))]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postrl"
    library = folder / f"kernels-{digest}.so"
    try:
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as building:
            built = Path(building) / "kernels.so"
            _compile([*compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(built)])
            built.replace(library)  # at once: another process may be building the same
    except OSError as error:
        raise BuildError(f"{folder} must be writable for the compiled kernels (set XDG_CACHE_HOME): {error}") from error
    return library


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} can't be started: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nended with {result.returncode}:\n{result.stderr[-2000:]}")


def _compiler() -> list[str]:
    if named := shlex.split(os.environ.get("CXX", "")):
        if not (path := shutil.which(named[0])):
            raise BuildError(f"CXX names the C++ compiler {named[0]!r}, which is not on PATH: correct or unset CXX")
        return [path, *named[1:]]
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError("no C++ compiler: install g++ or clang++, or `pip install -e .[compiler]`, or set CXX")


def _processor() -> str:
    """What `-march=native` looks at: a cache in a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
