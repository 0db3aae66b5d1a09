"""The few system calls that Python 3.11 doesn't wrap. Each raises OSError that names the call and its arguments."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    status = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(status, f"mount({source!r}, {target!r}, {kind!r}, {flags:#x}, {options!r})")


def mount_tmpfs(target: str, size_bytes: int, num_inodes: int) -> None:
    """A tmpfs that holds at most that much. Kernels count in pages, and the root directory is the first inode."""
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_bytes},nr_inodes={num_inodes},mode=755")


def bind(source: str, target: str) -> None:
    mount(source, target, "", MS_BIND | MS_REC)


def die_with_parent(signal_number: int) -> None:
    """Asks for a signal when the parent's calling thread ends. Cleared by setuid: call it after."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal_number), "prctl(PR_SET_PDEATHSIG)")


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, so that it can wait for them."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "prctl(PR_SET_CHILD_SUBREAPER)")


def _check(status: int, call: str) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def _prctl(option: int, argument: int) -> int:
    zero = ctypes.c_ulong(0)
    return _libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero)
