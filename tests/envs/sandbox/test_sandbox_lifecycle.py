"""Making, closing, losing and collecting sandboxes: nothing leaks, whoever dies."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.sandbox import BubblewrapFactory, SandboxUnavailable, default_factory
from envs.sandbox.box import BubblewrapSandbox
from envs.sandbox.keeper import cgroups
from postrl.contracts import ExecResult, InfraError, Resources

REPOSITORY = Path(__file__).resolve().parents[3]
Running = Callable[[str], list[int]]
Eventually = Callable[[Callable[[], bool], str], None]
NUM_SPARES = 2


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    pending = [pid]
    while pending:
        for path in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pending += (new := {int(child) for child in path.read_text().split()})
                found |= new
    return found


def guard_of(factory: BubblewrapFactory) -> int:
    """The process that waits for the zygote, a child of this one."""
    return factory._zygote._process.pid


def zygote_of(guard: int) -> int:
    (zygote,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return int(zygote)


def keepers_of(factory: BubblewrapFactory) -> list[int]:
    """In the order of their birth."""
    zygote = zygote_of(guard_of(factory))
    return [int(pid) for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()]


def groups_of(factory: BubblewrapFactory) -> list[str]:
    """Control groups of its keepers, in the order of their birth; empty on a machine without."""
    return [
        f"{parent}/{name}"
        for keeper in keepers_of(factory)
        for parent in factory._options.cgroups.values()
        for name in Path(f"/proc/{keeper}/cgroup").read_text().replace("\n", "/").split("/")
        if name.startswith(cgroups.PREFIX) and Path(parent, name).exists()
    ]


def groups_left_by(pid: int) -> list[str]:
    """Control groups of sandboxes whose owner is that process."""
    prefix = f"{cgroups.PREFIX}{os.stat('/proc/self/ns/pid').st_ino}-{pid}-"
    return [name for parent in cgroups.detect().values() for name in os.listdir(parent) if name.startswith(prefix)]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def own_factory():
    factory = BubblewrapFactory()
    yield factory
    factory.close()


@contextlib.contextmanager
def sleeping(sandbox: BubblewrapSandbox, pids_running: Running, word: str) -> Iterator[Future[ExecResult]]:
    """A command that sleeps for `word` seconds, ten minutes or more, from when all of its processes are there.

    It ends with the block in any case: a check that fails must not wait for it.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.exec, ["sleep", word], timeout_s=600)
        try:
            # bwrap has the word among its arguments, too, before there is a process in its namespaces.
            while "sleep" not in (Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids_running(word)):
                assert not future.done(), future.result()
            yield future
        finally:
            sandbox.close()


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder in which the users that commands run under can execute programs; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


# --------------------------------------------------------------------------------------------------- many at once


def test_sixteen_threads(factory: BubblewrapFactory):
    def play(number: int) -> bytes:
        with factory.create({"number": str(number).encode()}) as sandbox:
            sandbox.exec(["bash", "-c", "expr $(cat number) + 1 > next"])
            sandbox.put("third", sandbox.get("next") * 2)
            return sandbox.exec(["cat", "number", "next", "third"]).stdout

    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(play, range(10, 74)))
    assert outputs == [f"{n}{n + 1}\n{n + 1}\n{n + 1}\n".encode() for n in range(10, 74)]


def test_a_sandbox_outlives_the_thread_that_made_it(factory: BubblewrapFactory):
    made = []
    thread = threading.Thread(target=lambda: made.append(factory.create({"a": b"1"})))
    thread.start()
    thread.join()
    with made[0] as sandbox:
        assert sandbox.exec(["cat", "a"]).stdout == b"1"


def test_commands_of_one_sandbox_take_turns(factory: BubblewrapFactory):
    script = "test ! -e busy && touch busy && sleep 0.02 && rm busy"
    with factory.create({}) as sandbox, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: sandbox.exec(["bash", "-c", script]), range(8)))
        assert [result.exit_code for result in results] == [0] * 8
        assert len(sandbox.commands) == 8


# ---------------------------------------------------------------------------------------------------- no trace left


def test_nothing_is_left_after_close(own_factory: BubblewrapFactory, pids_running: Running, eventually: Eventually):
    mounts = Path("/proc/self/mountinfo").read_text()
    own_factory.create({}).close()
    eventually(lambda: len(keepers_of(own_factory)) == NUM_SPARES, "spare keepers are there")
    descriptors = num_descriptors()
    word = f"600.{uuid.uuid4().int}"
    for number in range(20):
        sandbox = own_factory.create({"a": b"x" * 1000})
        sandbox.exec(["bash", "-c", f"sleep {word} & exit {number}"])
        (group, *_) = groups_of(own_factory) or [None]
        sandbox.close()
        sandbox.close()
        assert pids_running(word) == []
        assert group is None or not Path(group).exists()
    assert num_descriptors() == descriptors
    assert Path("/proc/self/mountinfo").read_text() == mounts
    eventually(lambda: len(keepers_of(own_factory)) == NUM_SPARES, "only spare keepers are there")


def test_closing_a_factory_ends_its_sandboxes(own_factory: BubblewrapFactory, pids_running: Running):
    word = f"600.{uuid.uuid4().int}"
    sandbox = own_factory.create({})
    with sleeping(sandbox, pids_running, word) as future:
        processes, groups = descendants(guard_of(own_factory)), groups_of(own_factory)
        assert len(processes) >= 4
        own_factory.close()
        own_factory.close()
        with pytest.raises(InfraError, match="lost"):
            future.result(timeout=30)
    assert pids_running(word) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not any(Path(group).exists() for group in groups)
    with pytest.raises(ValueError, match="closed"):
        own_factory.create({})


def test_close_interrupts_a_command(factory: BubblewrapFactory, pids_running: Running):
    word = f"600.{uuid.uuid4().int}"
    sandbox = factory.create({})
    with sleeping(sandbox, pids_running, word) as future:
        sandbox.close()
        assert pids_running(word) == []
        with pytest.raises(InfraError, match="closed"):
            future.result(timeout=30)


def test_a_forgotten_sandbox_is_collected(own_factory: BubblewrapFactory, eventually: Eventually):
    eventually(lambda: len(keepers_of(own_factory)) == NUM_SPARES, "spare keepers are there")
    sandbox = own_factory.create({})
    eventually(lambda: len(keepers_of(own_factory)) == NUM_SPARES + 1, "the sandbox's keeper was replaced as a spare")
    del sandbox
    gc.collect()
    eventually(lambda: len(keepers_of(own_factory)) == NUM_SPARES, "the keeper has ended")


# ------------------------------------------------------------------------------------------------------ who may die


TRAINER = """
import sys, threading
sys.path.insert(0, {repository!r})
from envs.sandbox import BubblewrapFactory
factory = BubblewrapFactory()
sandboxes = [factory.create({{"a": b"1"}}) for _ in range(3)]
for sandbox in sandboxes[:2]:
    threading.Thread(target=sandbox.exec, args=(["bash", "-c", "setsid sleep {word} & sleep {word}"],),
                     kwargs={{"timeout_s": 600}}).start()
print("ready", flush=True)
threading.Event().wait()
"""


def start_trainer(word: str) -> subprocess.Popen[str]:
    program = TRAINER.format(repository=str(REPOSITORY), word=word)
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    return trainer


@pytest.mark.parametrize("victim", ["trainer", "guard", "zygote"])
def test_a_killed_trainer_leaves_nothing(victim: str, pids_running: Running, eventually: Eventually):
    word = f"600.{uuid.uuid4().int}"
    trainer = start_trainer(word)
    try:
        eventually(lambda: len(pids_running(word)) >= 4, "the commands run")
        everybody = descendants(trainer.pid)
        (guard,) = [pid for pid in everybody if f"PPid:\t{trainer.pid}\n" in Path(f"/proc/{pid}/status").read_text()]
        os.kill({"trainer": trainer.pid, "guard": guard, "zygote": zygote_of(guard)}[victim], signal.SIGKILL)
        eventually(lambda: pids_running(word) == [], "the commands have ended")
        gone = everybody - {guard}  # a guard that was killed stays a zombie until its trainer looks
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone), "keepers and zygote have ended")
    finally:
        trainer.kill()
        trainer.wait()
    with BubblewrapFactory().create({}):  # starting collects what the dead left behind
        assert groups_left_by(trainer.pid) == []


def test_a_lost_zygote_is_a_fault_of_ours_and_is_replaced(own_factory: BubblewrapFactory):
    sandbox = own_factory.create({})
    os.kill(zygote_of(guard_of(own_factory)), signal.SIGKILL)
    own_factory._zygote._process.wait()
    with pytest.raises(InfraError, match="lost"):
        sandbox.exec(["true"])
    with pytest.raises(InfraError, match="lost earlier"):
        sandbox.exec(["true"])
    sandbox.close()
    with own_factory.create({}) as another:
        assert another.exec(["true"]).exit_code == 0


def test_a_lost_keeper_is_a_fault_of_ours(own_factory: BubblewrapFactory, pids_running: Running):
    word = f"600.{uuid.uuid4().int}"
    with sleeping(own_factory.create({}), pids_running, word) as future:
        (keeper,) = [pid for pid in keepers_of(own_factory) if descendants(pid)]
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(InfraError, match="lost"):
            future.result(timeout=30)
    assert pids_running(word) == []


def test_a_forked_process_makes_its_own_and_spares_its_parents(own_factory: BubblewrapFactory):
    with own_factory.create({"a": b"1"}) as sandbox:
        program = os.fork()
        if program == 0:
            status = 1
            try:
                sandbox.close()
                with own_factory.create({"b": b"2"}) as mine:
                    status = 0 if mine.exec(["cat", "b"]).stdout == b"2" else 2
                own_factory.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == 0
        assert sandbox.exec(["cat", "a"]).stdout == b"1"


def test_an_interrupted_thread_loses_its_sandbox(factory: BubblewrapFactory):
    program = f"""
import sys, signal, threading, os
sys.path.insert(0, {str(REPOSITORY)!r})
from envs.sandbox import BubblewrapFactory
from postrl.contracts import InfraError
factory = BubblewrapFactory()
sandbox = factory.create({{}})
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    sandbox.exec(["sleep", "600"], timeout_s=600)
except KeyboardInterrupt:
    print("interrupted")
try:
    sandbox.exec(["true"])
except InfraError as error:
    print(error)
sandbox.close()
factory.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("interrupted\nthis sandbox was lost earlier: the thread that ran 'sleep'"), (
        done.stderr
    )


# ------------------------------------------------------------------------------------------------- what can't be made


def test_files_that_do_not_fit(factory: BubblewrapFactory):
    with pytest.raises(ValueError, match=r"raise Resources\.disk_mb"):
        factory.create({"big": bytes(2 << 20)}, Resources(disk_mb=1))
    with pytest.raises(ValueError, match="both a file and a directory"):
        factory.create({"a": b"", "a/b": b""})
    with pytest.raises(ValueError, match="expected a relative path"):
        factory.create({"../a": b""})
    with pytest.raises(ValueError, match="shorten a name"):
        factory.create({"x" * 256: b""})


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "dnf").write_text("")
    (tmp_path / "dnf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxUnavailable, match=r"not installed.*:  sudo dnf install -y bubblewrap$"):
        BubblewrapFactory()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(InfraError, match=r"with:  dnf install -y bubblewrap$"):
        BubblewrapFactory()


def test_a_bubblewrap_that_can_not_start_is_no_exit_code(monkeypatch: pytest.MonkeyPatch, everyones: Path):
    (everyones / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (everyones / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{everyones}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=r"bwrap: No permissions to create new namespace"):
        BubblewrapFactory()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(everyones).encode() in path.read_bytes()]


def test_an_older_bubblewrap(monkeypatch: pytest.MonkeyPatch, everyones: Path):
    """Before 0.8 it has no --disable-userns: that is noticed, and the rest holds."""
    real = shutil.which("bwrap")
    (everyones / "bwrap").write_text(
        f"""#!/bin/sh
case "$*" in
    --help) {real} --help | grep -v disable-userns ;;
    *--disable-userns*) echo "bwrap: Unknown option --disable-userns" >&2; exit 1 ;;
    *) exec {real} "$@" ;;
esac
"""
    )
    (everyones / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{everyones}:{os.environ['PATH']}")
    factory = BubblewrapFactory(control_groups=False)
    try:
        assert "possible" in factory.describe()["user namespaces inside"]
        with factory.create({}, Resources(num_processes=8)) as sandbox:
            # Processes in namespaces of its own still count.
            program = """
import ctypes, os, time
libc = ctypes.CDLL(None)
born = 0
try:
    while True:
        if os.fork() == 0:
            libc.unshare(0x10000000)
            try:
                while os.fork():
                    os.write(1, b"+")
            except OSError:
                pass
            time.sleep(60)
        os.write(1, b"+")
except OSError:
    pass
"""
            result = sandbox.exec(["python3", "-c", program], timeout_s=2.0)
            assert 1 <= result.stdout.count(b"+") < 8
    finally:
        factory.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a namespace with root in it on every kind of host")
def test_forbidden_user_namespaces(factory: BubblewrapFactory):
    program = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from envs.sandbox import BubblewrapFactory, SandboxUnavailable
try:
    BubblewrapFactory(control_groups=False)
except SandboxUnavailable as error:
    print(error)
"""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Allow them with:  sysctl -w user.max_user_namespaces=15000" in done.stdout, done.stdout + done.stderr


def test_a_python_that_is_none(tmp_path: Path):
    with pytest.raises(ValueError, match=r"bin/python3 >= 3\.11"):
        BubblewrapFactory(python_prefix=tmp_path)


def test_another_python_than_the_systems(tmp_path: Path):
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        pytest.skip("this Python is the system's")
    factory = BubblewrapFactory(python_prefix=prefix)
    try:
        with factory.create({}) as sandbox:
            script = "import sys; print(sys.version_info[:3]); import numpy"
            result = sandbox.exec(["python3", "-c", script])
            assert result.stdout.decode() == f"{sys.version_info[:3]}\n"
            assert b"No module named 'numpy'" in result.stderr
            assert sandbox.exec(["bash", "-c", "command -v python3"]).stdout == b"/opt/bin/python3\n"
    finally:
        factory.close()


def test_the_default_factory_is_made_once():
    with ThreadPoolExecutor(8) as pool:
        factories = set(pool.map(lambda _: default_factory(), range(8)))
    assert len(factories) == 1
