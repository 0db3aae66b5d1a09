"""Whether this machine can make sandboxes, and if not, the one thing to do about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from postrl.contracts import InfraError

MIN_PYTHON = (3, 11)
PRINT_VERSION = ("-I", "-S", "-c", "import json, sys; print('%d.%d.%d' % sys.version_info[:3])")
_INSTALL = {
    "apt-get": "apt-get install -y bubblewrap",
    "dnf": "dnf install -y bubblewrap",
    "zypper": "zypper install -y bubblewrap",
    "pacman": "pacman -S --noconfirm bubblewrap",
    "apk": "apk add bubblewrap",
}
_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "15000"),
)
"""Settings below /proc/sys that forbid user namespaces: name, the value that does, one that doesn't."""


class SandboxUnavailable(InfraError):
    """This machine can't make a sandbox. What the policy writes never runs outside one, so there is nothing to fall
    back to."""


def find_bwrap() -> str:
    return _find("bwrap", "bubblewrap is not installed. Install it with:  " + as_root(install_command()))


def can_disable_userns(bwrap: str) -> bool:
    """Whether it is bubblewrap 0.8 or newer."""
    return "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


def require_prlimit() -> None:
    """It is looked for where sandboxes will: below /usr, which they share."""
    if not os.access("/usr/bin/prlimit", os.X_OK):
        raise SandboxUnavailable(
            "/usr/bin/prlimit is missing, which sets the limits of every command: install util-linux"
        )


def find_python(prefix: Path | None) -> tuple[str, str]:
    """The installation whose bin/python3 sandboxes get, and its version: the given one, the system's, or our own.

    Raises ValueError for a given one without a Python >= 3.11, SandboxUnavailable when neither of the others has one.
    """
    if prefix is not None:
        version = _version(prefix)
        if version is None or _pair(version) < MIN_PYTHON:
            raise ValueError(f"python_prefix {prefix}: expected bin/python3 >= 3.11 there, found {version}")
        return str(prefix.resolve()), version
    for candidate in (Path("/usr"), Path(sys.base_prefix).resolve()):
        version = _version(candidate)
        if version is not None and _pair(version) >= MIN_PYTHON:
            return str(candidate), version
    raise SandboxUnavailable(
        f"no Python >= 3.11 for sandboxes: neither /usr/bin/python3 nor {sys.base_prefix}/bin/python3 is one; "
        "pass python_prefix"
    )


def require_own_process_count(drops_uid: bool) -> None:
    """Without root, before Linux 5.14, RLIMIT_NPROC counts all of the host user's processes, the trainer's too."""
    release = os.uname().release
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if not drops_uid and version < (5, 14):
        raise SandboxUnavailable(
            f"Linux {release}: without root the number of a sandbox's processes can be limited from 5.14 on"
        )


def install_command() -> str:
    for program, command in _INSTALL.items():
        if shutil.which(program):
            return command
    return _INSTALL["apt-get"]


def as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"


def explain(error: str) -> str:
    """`error`, from the kernel or bwrap, with what to do when it comes from a setting that forbids user namespaces."""
    remedies = []
    for name, forbidding, allowing in _SWITCHES:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbidding:
            remedies.append(as_root(f"sysctl -w {name.replace('/', '.')}={allowing}"))
    if remedies:
        return f"{error.strip()}\nThis machine forbids user namespaces. Allow them with:  {' && '.join(remedies)}"
    return (
        f"{error.strip()}\nUser namespaces or mounts may be forbidden here. In a container, start it with "
        "--privileged, or with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined"
    )


def _find(program: str, otherwise: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise SandboxUnavailable(otherwise)
    return os.path.realpath(path)


def _version(prefix: Path) -> str | None:
    """`3.11.7`; None when there is no Python."""
    try:
        answer = subprocess.run(
            [prefix / "bin/python3", *PRINT_VERSION], capture_output=True, check=True, timeout=60, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
