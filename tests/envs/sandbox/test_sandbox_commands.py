"""What a command gets, and what comes back of it."""

from __future__ import annotations

import ast
import hashlib

import pytest

from envs.sandbox import BubblewrapFactory
from envs.sandbox.box import ENVIRONMENT, BubblewrapSandbox
from postrl.contracts import InfraError, Resources, Sandbox, SandboxFactory


@pytest.fixture
def sandbox(factory: BubblewrapFactory):
    with factory.create({"numbers.txt": b"3 c\n1 a\n2 b\n", "src/hello.py": b"print('hello')\n"}) as sandbox:
        yield sandbox


def test_protocols(factory: BubblewrapFactory, sandbox: BubblewrapSandbox):
    checked: SandboxFactory = factory
    assert checked is factory
    assert isinstance(sandbox, Sandbox)


def test_streams_and_exit_code(sandbox: BubblewrapSandbox):
    result = sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr, result.killed_by) == (3, b"out\n", b"err\n", None)
    assert not result.stdout_truncated
    assert not result.stderr_truncated
    assert result.wall_s > 0
    assert result.cpu_s > 0
    assert result.max_rss_mb > 1


@pytest.mark.parametrize(
    ("argv", "exit_code"),
    [
        (["true"], 0),
        (["false"], 1),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["sh", "-c", "kill -SEGV $$"], 139),
        (["no-such-program"], 127),
        (["/work/no-such-program"], 127),
        (["/work/numbers.txt"], 126),
        (["/work"], 126),
        (["sh", "-c", "no-such-program"], 127),
    ],
)
def test_exit_codes_are_a_shells(sandbox: BubblewrapSandbox, argv: list[str], exit_code: int):
    result = sandbox.exec(argv)
    assert (result.exit_code, result.killed_by) == (exit_code, None)


def test_arguments_are_passed_as_they_are(sandbox: BubblewrapSandbox):
    words = ["$HOME", "a b", "*", "'\"\\", "", "é\n", "--", "-x", "=", "$(id)"]
    result = sandbox.exec(["python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *words])
    assert result.stdout.decode() == ascii(words) + "\n"
    assert sandbox.exec(["sh", "-c", 'printf %s "$1"', "sh", "\udcff"]).stdout == b"\xff"


@pytest.mark.parametrize("argument", ["a\0b", "x" * 131_072, "\ud800"])
def test_what_no_kernel_would_run_is_not_executable(sandbox: BubblewrapSandbox, argument: str):
    result = sandbox.exec(["echo", argument])
    assert (result.exit_code, result.killed_by, result.stdout) == (126, None, b"")
    assert result.stderr.startswith(b"sandbox: ")
    assert sandbox.exec(["echo", "x" * 131_071]).exit_code == 0


def test_many_arguments(sandbox: BubblewrapSandbox):
    assert sandbox.exec(["true", *(["x" * 100_000] * 10)]).exit_code == 0
    assert sandbox.exec(["true", *(["x" * 100_000] * 11)]).exit_code == 126


def test_misuse_is_a_value_error(sandbox: BubblewrapSandbox):
    for argv in ("ls -l", [], ()):
        with pytest.raises(ValueError, match="argv"):
            sandbox.exec(argv)
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            sandbox.exec(["true"], timeout_s=timeout_s)
    for env in ({"": "x"}, {"A=B": "x"}, {"A": "x\0"}):
        with pytest.raises(ValueError, match="environment variable"):
            sandbox.exec(["true"], env=env)
    assert sandbox.commands == ()


def test_environment_is_exactly_the_documented_one(sandbox: BubblewrapSandbox):
    program = "import os; print(sorted(os.environ.items()))"
    result = sandbox.exec(["python3", "-c", program])
    assert ast.literal_eval(result.stdout.decode()) == sorted({**ENVIRONMENT, "PWD": "/work"}.items())
    result = sandbox.exec(["python3", "-c", program], env={"ANSWER": "4 2", "TZ": "Asia/Tokyo"})
    assert dict(ast.literal_eval(result.stdout.decode())) == {
        **ENVIRONMENT,
        "PWD": "/work",
        "ANSWER": "4 2",
        "TZ": "Asia/Tokyo",
    }


def test_a_callers_loader_variables_act_inside_only(sandbox: BubblewrapSandbox):
    result = sandbox.exec(["sh", "-c", "echo run"], env={"LD_PRELOAD": "/work/evil.so"})
    assert result.stdout == b"run\n"
    assert result.stderr.count(b"evil.so") >= 1


def test_identity_and_settings(sandbox: BubblewrapSandbox):
    script = "id -u; id -g; hostname; umask; pwd; cat /etc/hostname; whoami; echo ~; date +%Z; locale charmap"
    words = sandbox.exec(["bash", "-c", script]).stdout.decode().split("\n")
    assert words == ["1000", "1000", "sandbox", "0022", "/work", "sandbox", "user", "/work", "UTC", "UTF-8", ""]


def test_signals_have_their_default_actions(sandbox: BubblewrapSandbox):
    ignored = "import signal; print([s for s in range(1, 32) if signal.getsignal(s) == signal.SIG_IGN])"
    # Python itself ignores SIGPIPE and SIGXFSZ; anything else would have been inherited from us.
    assert sandbox.exec(["python3", "-c", ignored]).stdout == b"[<Signals.SIGPIPE: 13>, <Signals.SIGXFSZ: 25>]\n" or (
        sandbox.exec(["python3", "-c", ignored]).stdout == b"[13, 25]\n"
    )
    status = sandbox.exec(["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]).stdout.decode().split()
    # Signals 32 and 33 are the C library's own: no program can set them, and whoever started us may ignore them.
    blocked, ignored_mask = (int(status[i], 16) & ~(0b11 << 31) for i in (1, 3))
    assert (status[0], blocked, status[2], ignored_mask) == ("SigBlk:", 0, "SigIgn:", 0)
    assert sandbox.exec(["bash", "-c", "yes | head -1"]).exit_code == 0


@pytest.mark.parametrize(
    ("script", "stdout"),
    [
        ("awk '{s += $1} END {print s}' numbers.txt", b"6\n"),
        ("sed 's/a/X/' numbers.txt | sort", b"1 X\n2 b\n3 c\n"),
        ("grep -c . numbers.txt", b"3\n"),
        ("find . -type f | sort", b"./numbers.txt\n./src/hello.py\n"),
        ("cut -d' ' -f2 numbers.txt | tr a-z A-Z | paste -sd,", b"C,A,B\n"),
        ("head -1 numbers.txt; tail -1 numbers.txt; wc -l < numbers.txt", b"3 c\n2 b\n3\n"),
        ("tar cf - src | tar tf -", b"src/\nsrc/hello.py\n"),
        ("gzip -c numbers.txt | gunzip | cmp - numbers.txt && echo same", b"same\n"),
        ("python3 src/hello.py && python src/hello.py", b"hello\nhello\n"),
        ("diff numbers.txt <(sort numbers.txt) | head -1", b"1d0\n"),
        ("echo hi | tee /dev/stderr > /dev/null; xargs -n1 echo < <(echo 1 2)", b"1\n2\n"),
    ],
)
def test_tools_work(sandbox: BubblewrapSandbox, script: str, stdout: bytes):
    result = sandbox.exec(["bash", "-c", script])
    assert (result.stdout, result.exit_code) == (stdout, 0), result.stderr


def test_python_is_new_and_bare(sandbox: BubblewrapSandbox):
    program = """
import sys, json, unittest
assert sys.version_info >= (3, 11)
for name in ("numpy", "pip", "pytest", "postrl", "jax"):
    try:
        __import__(name)
    except ImportError:
        continue
    print(name)
print(hash("a"), sys.flags.hash_randomization, sys.dont_write_bytecode)
"""
    first = sandbox.exec(["python3", "-c", program])
    assert first.stdout.endswith(b" 0 True\n")
    assert first.stdout.count(b"\n") == 1
    assert sandbox.exec(["/opt/bin/python3", "-c", program]).stdout == first.stdout
    assert sandbox.exec(["python3", "-I", "-S", "-c", "pass"]).exit_code == 0


def test_stdin_is_empty(sandbox: BubblewrapSandbox):
    assert sandbox.exec(["cat"]).stdout == b""
    assert sandbox.exec(["python3", "-c", "input()"]).exit_code == 1
    assert sandbox.exec(["bash", "-c", "read x; echo $?"]).stdout == b"1\n"


def test_files_stay_and_processes_end(sandbox: BubblewrapSandbox):
    sandbox.exec(["bash", "-c", "echo kept > /tmp/a; echo kept > b; cd src; export X=1; (sleep 0.2; echo late > c) &"])
    result = sandbox.exec(["bash", "-c", "cat /tmp/a b; pwd; echo ${X-unset}; sleep 0.3; ls"])
    assert result.stdout == b"kept\nkept\n/work\nunset\nb\nnumbers.txt\nsrc\n"


# ------------------------------------------------------------------------------------------------------- limits


def test_timeout(sandbox: BubblewrapSandbox):
    result = sandbox.exec(["bash", "-c", "echo begun; sleep 60"], timeout_s=0.5)
    assert (result.killed_by, result.exit_code, result.stdout) == ("timeout", None, b"begun\n")
    busy = sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=1.0)
    assert busy.killed_by == "timeout"
    assert busy.cpu_s > 0.05  # counted although the process was killed
    assert sandbox.exec(["true"]).exit_code == 0


def test_cpu_time(factory: BubblewrapFactory):
    with factory.create({}, Resources(cpu_s=1, timeout_s=60)) as sandbox:
        for ignore in ("", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"):
            result = sandbox.exec(["python3", "-c", ignore + "while True: pass"])
            assert (result.killed_by, result.exit_code) == ("cpu", None)
        # The signal alone, without the time, is the command's own doing.
        assert sandbox.exec(["sh", "-c", "kill -XCPU $$"]).exit_code == 152


def test_file_size(factory: BubblewrapFactory):
    with factory.create({}, Resources(disk_mb=4, file_mb=1)) as sandbox:
        result = sandbox.exec(["head", "-c", str((1 << 20) + 1), "/dev/zero"])
        assert result.stdout_truncated
        result = sandbox.exec(["bash", "-c", "head -c 1048577 /dev/zero > big"])
        assert result.exit_code == 128 + 25  # SIGXFSZ
        assert sandbox.exec(["stat", "-c", "%s", "big"]).stdout == b"1048576\n"


def test_output_is_cut_at_the_cap(factory: BubblewrapFactory):
    with factory.create({}, Resources(output_bytes=100)) as sandbox:
        exact = sandbox.exec(["head", "-c", "100", "/dev/zero"])
        assert (exact.stdout, exact.stdout_truncated) == (bytes(100), False)
        script = "head -c 101 /dev/zero; head -c 6300 /dev/zero >&2; echo done > end"
        longer = sandbox.exec(["bash", "-c", script])
        assert (longer.exit_code, longer.stdout, longer.stderr) == (0, bytes(100), bytes(100))
        assert longer.stdout_truncated
        assert longer.stderr_truncated
        assert sandbox.list() == ("end",)


@pytest.mark.parametrize("redirect", ["", ">&2"])
def test_endless_output_ends_the_command(factory: BubblewrapFactory, redirect: str):
    with factory.create({}, Resources(output_bytes=1000, timeout_s=60)) as sandbox:
        result = sandbox.exec(["bash", "-c", f"yes {redirect}"])
        assert (result.killed_by, result.exit_code) == ("output", None)
        assert len(result.stdout) + len(result.stderr) == 1000
        assert sandbox.exec(["true"]).exit_code == 0


def test_no_output_can_be_kept(factory: BubblewrapFactory):
    with factory.create({}, Resources(output_bytes=0)) as sandbox:
        assert sandbox.exec(["true"]).exit_code == 0
        assert sandbox.exec(["yes"]).killed_by == "output"


@pytest.mark.parametrize(
    "resources",
    [
        Resources(memory_mb=8),
        Resources(disk_mb=0),
        Resources(file_mb=0),
        Resources(num_processes=0),
        Resources(cpu_s=0),
        Resources(timeout_s=0),
        Resources(output_bytes=-1),
    ],
)
def test_unusable_resources(factory: BubblewrapFactory, resources: Resources):
    with pytest.raises(ValueError, match=r"Resources\."):
        factory.create({}, resources)


def test_smallest_resources_work(factory: BubblewrapFactory):
    resources = Resources(memory_mb=16, disk_mb=1, file_mb=1, num_processes=1, cpu_s=1)
    with factory.create({"a": b"1"}, resources) as sandbox:
        assert sandbox.exec(["cat", "a"]).stdout == b"1"


# ---------------------------------------------------------------------------------------------------------- log


def test_every_command_is_recorded(sandbox: BubblewrapSandbox):
    sandbox.exec(["sh", "-c", "printf 'a\\377b'; printf x%.0s $(seq 600) >&2; exit 2"])
    sandbox.exec(["sleep", "60"], timeout_s=0.05)
    sandbox.exec(["a\0b"])
    first, second, third = sandbox.commands
    assert first.argv[:2] == ("sh", "-c")
    assert (first.exit_code, first.killed_by, first.stdout_excerpt) == (2, None, "a\ufffdb")
    assert first.stdout_digest == hashlib.sha256(b"a\xffb").hexdigest()
    assert first.stderr_digest == hashlib.sha256(b"x" * 600).hexdigest()
    assert first.stderr_excerpt == "x" * 500
    assert (second.argv, second.exit_code, second.killed_by) == (("sleep", "60"), None, "timeout")
    assert third.exit_code == 126
    sandbox.close()
    assert len(sandbox.commands) == 3


# -------------------------------------------------------------------------------------------------- determinism


def test_two_runs_give_the_same_bytes(factory: BubblewrapFactory):
    script = """
ls -laR --time-style=full-iso /work | sed -E 's/^total.*//'
env | sort; id; hostname; umask; nproc > /dev/null
python3 -c 'print({"b", "a", "c"}, hash("x"), list(__import__("os").scandir("/work"))[0].name)'
stat -c '%n %s %a %U %Y' /work/* /work /verify /verify/*
cat /etc/passwd /etc/group /etc/hosts /etc/machine-id; ls /etc / /dev
"""
    files = {"b.txt": b"2", "a/c.txt": b"3", "a/b/d.txt": b"4"}
    outputs = set()
    for _ in range(2):
        with factory.create(files, read_only={"/verify": {"check.py": b"pass\n"}}) as sandbox:
            result = sandbox.exec(["bash", "-c", script])
            assert (result.exit_code, result.stderr) == (0, b"")
            outputs.add(result.stdout)
    (output,) = outputs
    listed = [line for line in output.splitlines() if b" +0000 " in line]
    assert len(listed) == 2 + 3 + 3 + 2 + 1  # `.` and `..` of three directories, two directories, three files
    assert all(b" 2000-01-01 00:00:00.000000000 +0000 " in line for line in listed)


def test_describe_names_every_limit(factory: BubblewrapFactory, rlimits_factory: BubblewrapFactory):
    assert {"memory", "processes", "disk", "output", "wall time", "cpu time", "network"} <= set(factory.describe())
    assert "every 50 ms" in rlimits_factory.describe()["memory"]
    assert "cgroup" not in rlimits_factory.describe()["processes"]


def test_a_closed_sandbox_says_so(factory: BubblewrapFactory):
    sandbox = factory.create({})
    sandbox.close()
    for call in (lambda: sandbox.exec(["true"]), lambda: sandbox.get("a"), lambda: sandbox.put("a", b""), sandbox.list):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert not issubclass(ValueError, InfraError)
