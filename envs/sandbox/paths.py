"""Reading and writing below a directory that a hostile program has filled, without ever following a link.

Paths are walked one component at a time from a directory handle, each opened with O_NOFOLLOW. Modes count as they would
for the owner even where this process could read past them (root), so that both kinds of host give the same answers.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from postrl.contracts import Files

FIXED_MTIME_NS = 946_684_800 * 10**9
"""2000-01-01 UTC: what a sandbox is given looks the same on every run."""
MAX_DEPTH = 64
"""Files below more directories than this are left out of a listing."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split(path: str) -> list[bytes]:
    """The components of a relative path. Raises ValueError unless it is in its plainest form."""
    components = path.split("/")
    if any(component in ("", ".", "..") for component in components) or "\0" in path:
        raise ValueError(
            f"path {path!r}: expected a relative path without empty, '.' or '..' parts, such as 'src/main.py'"
        )
    return [os.fsencode(component) for component in components]


def write(top: int, path: str, data: bytes, mode: int, owner: int | None) -> None:
    """Writes a file below the directory handle `top`, making its parents (mode 0755); replaces whatever non-directory
    is there.

    Raises ValueError for a malformed path and OSError when the tree doesn't allow it: NotADirectoryError (a link or
    file among the parents), IsADirectoryError, PermissionError, or errno ENOSPC (the quota).
    """
    *parents, name = split(path)
    parent = os.dup(top)
    try:
        for component in parents:
            parent = _enter(parent, component, owner)
        _require(parent, 0o300, path)
        _remove(parent, name)
        descriptor = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            _finish(descriptor, mode, owner)
        finally:
            os.close(descriptor)
    finally:
        os.close(parent)


def write_all(top: int, files: Files, owner: int | None) -> None:
    """Writes `files` (mode 0644) and gives every directory on their way, `top` included, the same fixed time."""
    directories: set[tuple[bytes, ...]] = {()}
    for path in sorted(files):
        write(top, path, files[path], 0o644, owner)
        components = tuple(split(path))
        directories |= {components[:depth] for depth in range(1, len(components))}
    for directory in directories:
        descriptor = _open_directory(top, directory)
        os.utime(descriptor, ns=(FIXED_MTIME_NS, FIXED_MTIME_NS))
        os.close(descriptor)


def read(top: int, path: str, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of a regular file below `top`.

    Raises ValueError for a malformed path, FileNotFoundError unless there is a regular file reached without links, and
    PermissionError when its owner may not read it.
    """
    descriptor = os.dup(top)
    try:
        *parents, name = split(path)
        for component in parents:
            descriptor = _step(descriptor, component, _DIRECTORY, path)
            _require(descriptor, 0o100, path)
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        descriptor = _step(
            descriptor, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, path
        )
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{path!r} is not a regular file")
        _require(descriptor, 0o400, path)
        data = bytearray()
        while len(data) < max_bytes and (chunk := os.read(descriptor, min(max_bytes - len(data), 1 << 20))):
            data += chunk
        return bytes(data)
    finally:
        os.close(descriptor)


def walk(top: int) -> Iterator[str]:
    """Relative paths of the regular files below `top`, in no particular order.

    Left out: links and special files, directories that their owner may not list, what lies below more than MAX_DEPTH
    directories, and names that are not UTF-8.
    """
    pending: list[tuple[bytes, ...]] = [()]
    while pending:
        directory = pending.pop()
        try:
            descriptor = _open_directory(top, directory)
        except OSError:
            continue  # unlistable for its owner, or gone: a command may be running
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    name = (*directory, os.fsencode(entry.name))
                    if entry.is_dir(follow_symlinks=False) and len(name) <= MAX_DEPTH:
                        pending.append(name)
                    elif entry.is_file(follow_symlinks=False) and (path := _text(b"/".join(name))) is not None:
                        yield path
        finally:
            os.close(descriptor)


def _enter(parent: int, component: bytes, owner: int | None) -> int:
    """Opens the directory, making it if it isn't there, and closes `parent`."""
    try:
        child = os.open(component, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        _require(parent, 0o300, os.fsdecode(component))
        os.mkdir(component, 0o755, dir_fd=parent)
        child = os.open(component, _DIRECTORY, dir_fd=parent)
        _finish(child, 0o755, owner)
    os.close(parent)
    return child


def _finish(descriptor: int, mode: int, owner: int | None) -> None:
    if owner is not None:
        os.fchown(descriptor, owner, owner)
    os.fchmod(descriptor, mode)
    os.utime(descriptor, ns=(FIXED_MTIME_NS, FIXED_MTIME_NS))


def _remove(parent: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _step(parent: int, name: bytes, flags: int, path: str) -> int:
    """Opens `name` in `parent` and closes `parent`."""
    try:
        child = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        raise
    except OSError as error:
        raise FileNotFoundError(
            f"no regular file {path!r} (without links) in the work directory: {error.strerror}"
        ) from None
    os.close(parent)
    return child


def _open_directory(top: int, components: tuple[bytes, ...]) -> int:
    # Not a duplicate of `top`: two listings at once would share its read position.
    descriptor = os.open(".", _DIRECTORY, dir_fd=top)
    try:
        for component in components:
            child = os.open(component, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = child
            _require(descriptor, 0o500, os.fsdecode(component))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require(descriptor: int, owner_bits: int, path: str) -> None:
    if os.fstat(descriptor).st_mode & owner_bits != owner_bits:
        raise PermissionError(errno.EACCES, "its mode does not allow its owner that", path)


def _text(path: bytes) -> str | None:
    try:
        return path.decode()
    except UnicodeDecodeError:
        return None
