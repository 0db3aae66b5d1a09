"""What a sandbox sees of the host: system directories, a Python, and an /etc of our own.

The zygote lays out the shared part once (`build_base`); each keeper binds it into a root directory of its own
(`build_root`), where the read-only files of its sandbox are put as well. bwrap then mounts the whole root read-only.

    /usr, /bin, /lib*, /sbin   the host's; directories of installed Python packages appear empty
    /opt/bin/python3, python   a Python >= 3.11 with its standard library only; first on PATH
    /etc                       passwd, group, hosts, nsswitch.conf of ours; the host's alternatives and ld.so files
    /work                      the work directory and home; /tmp and /dev/shm share its quota
    /proc, /dev                private
"""

from __future__ import annotations

import glob
import os
import shutil

from . import kernel

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PYTHON_PACKAGES = (
    "usr/lib/python3*/dist-packages",
    "usr/lib/python3*/site-packages",
    "usr/lib64/python3*/site-packages",
    "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages",
    "usr/local/lib64/python3*/site-packages",
)
"""Emptied: what the trainer or the host's administrator installed must not change what a task's Python can import."""
_ETC_COPIED = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")
"""Debian's awk, among others, is a link through /etc/alternatives: without it the command is just missing."""
_ETC_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:1000:1000:user:/work:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "machine-id": "00000000000000000000000000000001\n",
}
_EMPTY = ("dev", "proc", "work", "tmp")


def build_base(base: str, python_prefix: str) -> None:
    """Lays out `base`, an empty directory. `python_prefix` is the Python installation that holds bin/python3."""
    for name in _SYSTEM:
        host = f"/{name}"
        if os.path.islink(host):
            os.symlink(os.readlink(host), f"{base}/{name}")
        elif os.path.isdir(host):
            os.mkdir(f"{base}/{name}")
            kernel.bind(host, f"{base}/{name}")
    _lay_out_etc(f"{base}/etc")
    place = _lay_out_python(base, python_prefix)
    os.mkdir(f"{base}/.empty")
    own = tuple(f"{place.lstrip('/')}/{lib}/python3*/site-packages" for lib in ("lib", "lib64"))
    for pattern in {*_PYTHON_PACKAGES, *own}:
        for path in glob.glob(f"{base}/{pattern}"):
            if os.path.isdir(path) and not os.path.islink(path):
                kernel.bind(f"{base}/.empty", path)


def build_root(base: str, root: str) -> None:
    """Makes `root`, an empty directory that the caller has mounted, look like `base`, with places to mount over."""
    for name in sorted(os.listdir(base)):
        source, target = f"{base}/{name}", f"{root}/{name}"
        if name.startswith("."):
            continue
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        else:
            os.mkdir(target)
            kernel.bind(source, target)
    for name in _EMPTY:
        os.mkdir(f"{root}/{name}")


def _lay_out_python(base: str, prefix: str) -> str:
    """Makes /opt/bin/python3 lead to the installation, which is bound unless it is visible already; returns its place.

    That is its own path, where the libraries of a shared build look for each other; only a path that sandboxes have for
    themselves gives way to /opt/python. Nothing but its programs and libraries appears there.
    """
    place = "/opt/python" if prefix.split("/")[1] in _EMPTY else prefix
    if not f"{place}/".startswith("/usr/"):
        for name in ("bin", "lib", "lib64"):
            if os.path.isdir(f"{prefix}/{name}"):
                os.makedirs(f"{base}{place}/{name}")
                kernel.bind(f"{prefix}/{name}", f"{base}{place}/{name}")
    os.makedirs(f"{base}/opt/bin")
    for name in ("python3", "python"):
        os.symlink(f"{place}/bin/python3", f"{base}/opt/bin/{name}")
    return place


def _lay_out_etc(etc: str) -> None:
    os.mkdir(etc)
    for name, text in _ETC_WRITTEN.items():
        with open(f"{etc}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    for name in _ETC_COPIED:
        host = f"/etc/{name}"
        if os.path.isdir(host):
            shutil.copytree(host, f"{etc}/{name}", symlinks=True)
        elif os.path.exists(host):
            shutil.copyfile(host, f"{etc}/{name}")
