"""The keeper's parts that can be looked at alone: messages, the system call filter, control groups, usage."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.keeper import cgroups, seccomp, usage, wire

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=50) | st.lists(st.text(max_size=10), max_size=5)

# ----------------------------------------------------------------------------------------------------------- messages


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=10), VALUES, max_size=5), max_size=4))
def test_messages_arrive_whole_and_in_order(messages: list[dict]):
    one, other = socket.socketpair()
    with one, other:
        for message in messages:
            wire.send(one, message)
        assert [wire.receive(other) for _ in messages] == [(message, []) for message in messages]
        one.close()
        assert wire.receive(other) == (None, [])


def test_descriptors_are_passed_and_not_inherited():
    one, other = socket.socketpair()
    read, write = os.pipe()
    with one, other:
        wire.send(one, {"n": 1}, [read, write])
        wire.send(one, {"n": 2})
        message, received = wire.receive(other)
        assert message == {"n": 1}
        assert [os.get_inheritable(descriptor) for descriptor in received] == [False, False]
        os.write(received[1], b"x")
        assert os.read(read, 10) == b"x"
        assert wire.receive(other) == ({"n": 2}, [])
    wire.close_all([read, write, *received])


def test_large_messages_and_cut_ones():
    one, other = socket.socketpair()
    with one, other:
        message = {"argv": ["x" * 1_000_000]}
        sender = threading.Thread(target=wire.send, args=(one, message))
        sender.start()
        assert wire.receive(other) == (message, [])
        sender.join()
        one.sendall(struct.pack("<I", 100) + b"{")
        one.close()
        assert wire.receive(other) == (None, [])


# --------------------------------------------------------------------------------------------------------- the filter


def verdict(program: bytes, audit: int, number: int) -> int:
    """What a filter returns, by classic BPF's rules; the part of the machine that it uses."""
    data = struct.pack("<II", number, audit)
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x15:
            at += if_true if accumulator == k else if_false
        elif code == 0x35:
            at += if_true if accumulator >= k else if_false
        else:
            assert code == 0x06
            return k


@given(st.sampled_from(["x86_64", "aarch64"]), st.integers(0, 2**32 - 1) | st.integers(0, 500))
def test_the_filter_refuses_its_list_and_nothing_else(machine: str, number: int):
    program = seccomp.program(machine)
    assert program is not None
    audit, column = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}[machine]
    denied = {row[column] for row in seccomp._DENIED.values()}
    expected = 0x00050001 if number in denied or number >= 0x40000000 else 0x7FFF0000
    assert verdict(program, audit, number) == expected
    assert verdict(program, audit ^ 1, number) == 0x80000000
    assert verdict(program, 0x40000003, number) == 0x80000000  # i386


def test_no_filter_for_an_unknown_machine():
    assert seccomp.program("riscv64") is None


# ------------------------------------------------------------------------------------------------------ control groups


def test_limits_of_version_2(tmp_path: Path):
    group = cgroups.group_of({"unified": str(tmp_path)}, "name")
    assert group is not None
    assert group == cgroups.Group(2, (f"{tmp_path}/postrl-name",))
    directory = tmp_path / "postrl-name"
    cgroups.create(group)
    assert (directory / "cgroup.procs").read_text() == "0"
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (directory / name).write_text("max")
    cgroups.limit(group, 1000, 7)
    assert [(directory / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")] == [
        "1000",
        "0",
        "7",
    ]
    (directory / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert cgroups.oom_kills(group) == 2
    assert cgroups.limits_memory(group)


def test_limits_of_version_1(tmp_path: Path):
    parents = {name: str(tmp_path / name) for name in ("memory", "pids")}
    for parent in parents.values():
        os.mkdir(parent)
    group = cgroups.group_of(parents, "name")
    assert group is not None
    cgroups.create(group)
    memory, pids = (Path(directory) for directory in group.directories)
    (memory / "memory.limit_in_bytes").write_text("")
    (pids / "pids.max").write_text("")
    cgroups.limit(group, 1000, 7)
    assert ((memory / "memory.limit_in_bytes").read_text(), (pids / "pids.max").read_text()) == ("1000", "7")
    assert not (memory / "memory.memsw.limit_in_bytes").exists()
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert cgroups.oom_kills(group) == 5
    assert cgroups.limits_memory(group)
    assert cgroups.group_of({}, "name") is None


def test_stale_groups_are_those_of_the_dead(tmp_path: Path):
    own = cgroups.owner_name(os.getpid())
    namespace, pid, ticks = own.split("-")
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    names = {
        "alive": f"postrl-{own}-1-0",
        "dead": f"postrl-{namespace}-{dead.pid}-{ticks}-1-0",
        "same pid, another process": f"postrl-{namespace}-{pid}-{int(ticks) - 1}-1-0",
        "another pid namespace": f"postrl-{int(namespace) + 1}-{dead.pid}-{ticks}-1-0",
        "not ours": "user.slice",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    removed = cgroups.collect_stale({"pids": str(tmp_path)})
    assert sorted(removed) == sorted(str(tmp_path / names[key]) for key in ("dead", "same pid, another process"))
    assert {path.name for path in tmp_path.iterdir()} == {
        names[key] for key in ("alive", "another pid namespace", "not ours")
    }


@pytest.mark.parametrize(
    ("mount", "root", "path", "directory"),
    [
        ("/sys/fs/cgroup", "/", "/user.slice/a", "/sys/fs/cgroup/user.slice/a"),
        ("/sys/fs/cgroup", "/", "/", "/sys/fs/cgroup"),
        ("/sys/fs/cgroup/pids", "/docker/1", "/docker/1/x", "/sys/fs/cgroup/pids/x"),
        ("/sys/fs/cgroup/pids", "/docker/1", "/docker/1", "/sys/fs/cgroup/pids"),
    ],
)
def test_where_a_group_is_mounted(mount: str, root: str, path: str, directory: str):
    assert cgroups._below(mount, root, path) == directory


# --------------------------------------------------------------------------------------------------------------- usage


def test_usage_counts_descendants():
    program = """
import os, sys
block = bytearray(30 << 20)
if os.fork() == 0:
    more = bytearray(30 << 20)
    while os.times().user < 0.2:
        pass
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdout.readline()
        seen = usage.observe(process.pid)
        assert seen.anonymous_bytes > 90 << 20  # the child's share of the parent's 30 MiB counts again
        assert seen.max_rss_kb > 60 << 10
        assert seen.cpu_s > 0.15
    process.wait()
    assert usage.observe(process.pid) == usage.Usage(0.0, 0, 0)
