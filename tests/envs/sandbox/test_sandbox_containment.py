"""Hostile commands: none gets out, none stays, none takes more than its share, and the sandbox works afterwards."""

from __future__ import annotations

import errno
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envs.sandbox import BubblewrapFactory, PutRefused
from envs.sandbox.box import BubblewrapSandbox
from postrl.contracts import PolicyError, Resources


@pytest.fixture
def sandbox(any_factory: BubblewrapFactory) -> Iterator[BubblewrapSandbox]:
    """Each test ends with a command that must still work."""
    with any_factory.create({"mine.txt": b"mine\n"}, read_only={"/verify": {"check.py": b"pass\n"}}) as sandbox:
        yield sandbox
        result = sandbox.exec(["echo", "still", "here"])
        assert (result.exit_code, result.stdout) == (0, b"still here\n")


def python(sandbox: BubblewrapSandbox, program: str, timeout_s: float = 30.0) -> str:
    """What a program prints. It must end well."""
    result = sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=timeout_s)
    assert (result.exit_code, result.stderr) == (0, b""), result
    return result.stdout.decode()


# ------------------------------------------------------------------------------------------------ taking too much


def test_number_of_processes(any_factory: BubblewrapFactory):
    program = """
import os, time
born = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        born += 1
except BlockingIOError:
    print(born)
"""
    for limit in (8, 20):
        with any_factory.create({}, Resources(num_processes=limit)) as sandbox:
            for _ in range(2):  # counted for each command, with nothing left of the one before
                assert python(sandbox, program) == f"{limit - 1}\n"


def test_threads_count_as_processes(any_factory: BubblewrapFactory):
    program = """
import threading
gate, threads = threading.Event(), []
try:
    while True:
        thread = threading.Thread(target=gate.wait)
        thread.start()
        threads.append(thread)
except RuntimeError:
    print(len(threads))
gate.set()
"""
    with any_factory.create({}, Resources(num_processes=8)) as sandbox:
        assert python(sandbox, program) == "7\n"


def test_fork_bomb(sandbox: BubblewrapSandbox, pids_running: Callable[[str], list[int]]):
    word = uuid.uuid4().hex
    result = sandbox.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 60", word], timeout_s=1.0)
    assert result.exit_code is not None or result.killed_by == "timeout"
    assert pids_running(word) == []


def test_sandboxes_do_not_share_a_count(any_factory: BubblewrapFactory):
    resources = Resources(num_processes=4)
    crowd = "sleep 30 & sleep 30 & sleep 30 & echo full > full; wait"
    with any_factory.create({}, resources) as one, any_factory.create({}, resources) as other:
        thread = threading.Thread(target=one.exec, args=(["bash", "-c", crowd],), kwargs={"timeout_s": 2.0})
        thread.start()
        assert other.exec(["bash", "-c", "true | true | cat"]).exit_code == 0
        thread.join()
        assert one.get("full") == b"full\n"


def test_memory_of_one_process(any_factory: BubblewrapFactory):
    with any_factory.create({}, Resources(memory_mb=64)) as sandbox:
        result = sandbox.exec(["python3", "-I", "-S", "-c", "x = bytearray(100 << 20)"])
        assert (result.exit_code, result.killed_by) == (1, None)
        assert b"MemoryError" in result.stderr


def test_memory_of_many_processes(any_factory: BubblewrapFactory):
    program = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        block = bytearray(40 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(60)
time.sleep(60)
"""
    with any_factory.create({}, Resources(memory_mb=64, disk_mb=1)) as sandbox:
        result = sandbox.exec(["python3", "-I", "-S", "-c", program], timeout_s=60.0)
        assert (result.killed_by, result.exit_code) == ("memory", None)
        assert result.max_rss_mb > 5
        assert sandbox.exec(["true"]).exit_code == 0


def test_memory_that_belongs_to_no_process(sandbox: BubblewrapSandbox):
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    print(name, getattr(libc, name)(*arguments), os.strerror(ctypes.get_errno()))
attempt("memfd_create", b"x", 0)
attempt("shmget", 0, 4096, 0o1600)
attempt("semget", 0, 1, 0o1600)
attempt("msgget", 0, 0o1600)
"""
    refused = "-1 Operation not permitted"
    assert python(sandbox, program).splitlines() == [
        f"{name} {refused}" for name in ("memfd_create", "shmget", "semget", "msgget")
    ]


def test_disk_filling(any_factory: BubblewrapFactory):
    with any_factory.create({}, Resources(disk_mb=4, file_mb=3)) as sandbox:
        for place in ("/work", "/tmp", "/dev/shm"):
            fill = f"cd {place}; for i in $(seq 9); do head -c 1M /dev/zero > f$i || break; done"
            result = sandbox.exec(["bash", "-c", fill])
            assert b"No space left on device" in result.stderr
            assert sandbox.exec(["bash", "-c", f"du -sm {place} | cut -f1"]).stdout in (b"4\n", b"3\n")
            with pytest.raises(PutRefused, match="No space left"):
                sandbox.put("more", bytes(2 << 20))
            sandbox.exec(["bash", "-c", f"rm {place}/f*"])
        sandbox.exec(["rm", "-f", "more"])
        sandbox.put("fits", bytes(3 << 20))


def test_a_million_files(any_factory: BubblewrapFactory):
    with any_factory.create({}, Resources(disk_mb=2)) as sandbox:
        program = """
made = 0
try:
    while True:
        open(f"f{made}", "w").close()
        made += 1
except OSError as error:
    print(made, error.strerror)
"""
        made, reason = python(sandbox, program).split(" ", 1)
        assert reason == "No space left on device\n"
        assert int(made) < 2048
        assert len(sandbox.list()) == int(made)


def test_nothing_else_is_writable(sandbox: BubblewrapSandbox):
    program = """
import os
for root, directories, names in os.walk("/", onerror=lambda error: None):
    private = ("/proc", "/work", "/tmp", "/dev/shm", "/dev/pts")
    directories[:] = [name for name in directories if os.path.join(root, name) not in private]
    if root.count("/") > 3:
        directories.clear()
    for name in [".", *names]:
        path = os.path.join(root, name)
        if not os.path.islink(path) and os.access(path, os.W_OK) and not path.startswith("/dev/"):
            print(path)
    try:
        os.mkdir(os.path.join(root, "new"))
        print("made", root)
    except OSError:
        pass
"""
    assert python(sandbox, program) == ""


# ---------------------------------------------------------------------------------------------------- staying alive


@pytest.mark.parametrize(
    "escape",
    [
        "sleep 600 &",
        "nohup sleep 600 > /dev/null 2>&1 &",
        "setsid sleep 600 > /dev/null 2>&1 < /dev/null &",
        "(setsid sh -c 'sleep 600 & sleep 600' > /dev/null 2>&1 &) &",
        "trap '' TERM HUP INT; (trap '' TERM HUP INT; sleep 600) & disown -a",
    ],
)
@pytest.mark.parametrize("end", ["exit 0", "sleep 600"])
def test_no_process_outlives_its_command(
    sandbox: BubblewrapSandbox, pids_running: Callable[[str], list[int]], escape: str, end: str
):
    word = f"600.{uuid.uuid4().int}"
    script = f"{escape} sleep 0.1; {end}".replace("sleep 600", f"sleep {word}")
    result = sandbox.exec(["bash", "-c", script], timeout_s=1.0)
    assert result.killed_by == (None if end == "exit 0" else "timeout")
    assert pids_running(word) == []


def test_a_double_forked_daemon_ends(sandbox: BubblewrapSandbox):
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        while True:
            with open("/work/alive", "a") as file:
                file.write(".")
            time.sleep(0.001)
    os._exit(0)
while not os.path.exists("/work/alive"):
    time.sleep(0.001)
"""
    python(sandbox, program)
    length = len(sandbox.get("alive"))
    assert length > 0
    sandbox.exec(["sleep", "0.05"])
    assert len(sandbox.get("alive")) == length


def test_stopped_and_traced_processes_end(sandbox: BubblewrapSandbox, pids_running: Callable[[str], list[int]]):
    word = f"600.{uuid.uuid4().int}"
    script = f"sleep {word} & kill -STOP $!; kill -STOP $$"
    assert sandbox.exec(["bash", "-c", script], timeout_s=0.5).killed_by == "timeout"
    attach_to_init = "import ctypes, time; ctypes.CDLL(None).ptrace(16, 1, None, None); time.sleep(600)"
    assert sandbox.exec(["python3", "-c", attach_to_init, word], timeout_s=0.5).killed_by == "timeout"
    assert pids_running(word) == []


def test_the_first_process_can_not_be_killed_from_inside(sandbox: BubblewrapSandbox):
    script = "for s in KILL TERM HUP INT STOP SEGV; do kill -$s 1; done; sleep 0.05; echo survived"
    assert sandbox.exec(["bash", "-c", script]).stdout == b"survived\n"


# --------------------------------------------------------------------------------------------------- looking around


def test_only_its_own_processes_are_visible(sandbox: BubblewrapSandbox):
    pids = sandbox.exec(["bash", "-c", "echo /proc/[0-9]*"]).stdout.decode().split()
    assert pids == ["/proc/1", "/proc/2"]
    host_pid = os.getpid()
    assert host_pid > 100
    assert sandbox.exec(["bash", "-c", f"kill -0 {host_pid}"]).stderr.endswith(b"No such process\n")


def test_nothing_shows_the_hosts_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSTRL_TEST_SECRET", "do-not-tell")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/do-not-tell")
    factory = BubblewrapFactory(control_groups=False)
    try:
        with factory.create({}) as sandbox:
            result = sandbox.exec(["bash", "-c", "cat /proc/*/environ /proc/*/cmdline; env; echo end"])
    finally:
        factory.close()
    assert result.stdout.endswith(b"end\n")
    assert b"do-not-tell" not in result.stdout


def test_only_three_descriptors_are_open(sandbox: BubblewrapSandbox):
    program = """
import os
for pid in (1, "self"):
    print(sorted(os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")
                 if os.path.islink(f"/proc/{pid}/fd/{fd}")))
"""
    first, own = python(sandbox, program).splitlines()
    assert first == "['/dev/null', 'anon_inode', 'pipe', 'pipe']"  # anon_inode: bwrap's own eventfd
    assert own == "['/dev/null', 'pipe', 'pipe']"


def test_the_hosts_files_are_not_there(sandbox: BubblewrapSandbox, tmp_path: Path):
    (tmp_path / "secret").write_text("of the host")
    tmp_path.chmod(0o755)
    for path in (
        tmp_path,
        tmp_path / "secret",
        Path(__file__),
        Path.home() / ".bashrc",
        Path("/etc/shadow"),
        Path("/sys"),
    ):
        result = sandbox.exec(["cat", str(path)])
        assert result.stderr.endswith(b"No such file or directory\n"), path
    assert sandbox.exec(["ls", "-A", "/tmp", "/dev/shm"]).stdout == b"/dev/shm:\n\n/tmp:\n"
    names = sandbox.exec(["ls", "-A", "/"]).stdout.decode().split()
    system = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr"}
    assert set(names) - system == {"dev", "etc", "opt", "proc", "tmp", "verify", "work"}


def test_sandboxes_do_not_see_each_other(any_factory: BubblewrapFactory):
    with any_factory.create({"own": b"1"}) as one, any_factory.create({"own": b"2"}) as other:
        one.exec(["bash", "-c", "echo 3 > /tmp/new; echo 3 > new; echo 3 > /dev/shm/new"])
        assert other.exec(["bash", "-c", "ls /tmp /dev/shm /work"]).stdout == b"/dev/shm:\n\n/tmp:\n\n/work:\nown\n"
        assert one.list() == ("new", "own")


def test_the_network_is_unreachable(sandbox: BubblewrapSandbox, tmp_path: Path):
    name = f"\0postrl-test-{uuid.uuid4().hex}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        tcp.bind(("127.0.0.1", 0))
        abstract.bind(name)
        named.bind(str(tmp_path / "socket"))
        for listening in (tcp, abstract, named):
            listening.listen()
        program = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})),
    (socket.AF_INET, ("10.0.0.1", 53)),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_INET6, ("2606:4700:4700::1111", 53)),
    (socket.AF_UNIX, {name!r}),
    (socket.AF_UNIX, {str(tmp_path / "socket")!r}),
):
    with socket.socket(family) as client:
        client.settimeout(5)
        try:
            client.connect(address)
            print("reached", address)
        except OSError:
            pass
try:
    print(socket.getaddrinfo("example.org", 80))
except socket.gaierror:
    pass
print([name for _, name in socket.if_nameindex()])
"""
        assert python(sandbox, program) == "['lo']\n"
    # Programs that talk to themselves over loopback work.
    own = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    server.accept()[0].sendall(b"hello")
    print(client.recv(5).decode())
"""
    assert python(sandbox, own) == "hello\n"


# ------------------------------------------------------------------------------------------------ gaining privileges


def test_no_capabilities_and_no_way_to_get_them(sandbox: BubblewrapSandbox):
    status = sandbox.exec(["grep", "-E", "^(Cap|NoNewPrivs|Seccomp:|Groups)", "/proc/self/status"]).stdout.decode()
    facts = dict(line.split(":", 1) for line in status.replace("\t", "").splitlines())
    assert {facts[name] for name in facts if name.startswith("Cap")} == {"0000000000000000"}
    assert facts["NoNewPrivs"] == "1"
    if os.uname().machine in ("x86_64", "aarch64"):
        assert facts["Seccomp"] == "2"


@pytest.mark.parametrize(
    "call",
    [
        "unshare, 0x10000000",  # user namespace
        "unshare, 0x00020000",  # mount namespace
        "chroot, b'/work'",
        "mount, b'tmpfs', b'/work', b'tmpfs', 0, None",
        "umount2, b'/work', 2",
        "sethostname, b'x', 1",
        "setuid, 0",
        "mknod, b'/work/device', 0o60600, 0x0800",
        "reboot, 0",
        "clock_settime, 0, (ctypes.c_long * 2)(0, 0)",
    ],
)
def test_privileged_calls_fail(sandbox: BubblewrapSandbox, call: str):
    name, *arguments = call.split(", ", 1)
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.{name}({", ".join(arguments)}))
"""
    assert python(sandbox, program) == "-1\n"


def test_limits_can_not_be_raised(sandbox: BubblewrapSandbox):
    program = """
import resource
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK"):
    kind = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print(name)
    except ValueError:
        pass
"""
    assert python(sandbox, program) == ""


# ------------------------------------------------------------------------------------- misleading what reads the files


def test_links_lead_nowhere(sandbox: BubblewrapSandbox, tmp_path: Path):
    (tmp_path / "secret").write_text("of the host")
    script = f"""
ln -s {tmp_path}/secret a; ln -s /etc/passwd b; ln -s ../../../../../../etc/passwd c; ln -s {tmp_path} d
ln -s mine.txt e
ln mine.txt f; mkfifo g; ln -s loop loop; ln -s /proc/self/environ h; ln -s /verify/check.py i; mkdir j; ln -s .. j/up
ln /etc/passwd k || true; ln /verify/check.py l || true; mknod m c 1 3 || true
"""
    sandbox.exec(["bash", "-c", script])
    assert sandbox.list() == ("f", "mine.txt")
    for path in ("a", "b", "c", "e", "g", "h", "i", "k", "l", "m", "loop", "d/secret", "j/up/mine.txt", "loop/x"):
        with pytest.raises(FileNotFoundError):
            sandbox.get(path)
    for path in ("d/new", "j/up/new", "loop/new"):
        with pytest.raises(PolicyError, match=r"Not a directory|Too many levels"):
            sandbox.put(path, b"written")
    with pytest.raises(PutRefused, match="Is a directory"):
        sandbox.put("j", b"written")
    sandbox.put("a", b"written")
    assert (sandbox.get("a"), (tmp_path / "secret").read_text()) == (b"written", "of the host")
    assert sandbox.list() == ("a", "f", "mine.txt")


def test_a_closed_work_directory_is_opened_again(sandbox: BubblewrapSandbox):
    sandbox.exec(["bash", "-c", "chmod 000 /work /tmp /dev/shm"])
    assert sandbox.list() == ("mine.txt",)
    sandbox.put("mine.txt", sandbox.get("mine.txt"))
    assert sandbox.exec(["cat", "mine.txt"]).stdout == b"mine\n"
    sandbox.exec(["bash", "-c", "mkdir deep; chmod 000 deep mine.txt"])
    assert sandbox.list() == ("mine.txt",)
    with pytest.raises(PermissionError):
        sandbox.get("mine.txt")
    with pytest.raises(PutRefused) as refused:
        sandbox.put("deep/x", b"")
    assert refused.value.errno == errno.EACCES


def test_removing_everything(sandbox: BubblewrapSandbox):
    sandbox.exec(["bash", "-c", "rm -rf /* /work/.* 2> /dev/null"])
    assert sandbox.list() == ()
    sandbox.put("new/file", b"1")
    assert sandbox.exec(["cat", "new/file"]).stdout == b"1"


def test_files_of_the_verifier_can_not_be_changed(sandbox: BubblewrapSandbox):
    attempts = ("echo x > {0}", "rm {0}", "mv /verify /v", "chmod 777 {0}", "touch /verify/new", "mkdir /x")
    script = "; ".join(attempts).format("/verify/check.py")
    result = sandbox.exec(["bash", "-c", script])
    assert result.stderr.count(b"\n") == 6
    assert result.stderr.count(b"Read-only file system") >= 5
    result = sandbox.exec(["bash", "-c", "cat /verify/check.py; ls /verify"])
    assert result.stdout == b"pass\ncheck.py\n"


@pytest.mark.parametrize("path", ["/work/x", "/tmp", "/usr/lib/x", "verify", "", "/", "//x", "/proc", "/etc"])
def test_read_only_files_have_their_own_place(factory: BubblewrapFactory, path: str):
    with pytest.raises(ValueError, match="read_only path"):
        factory.create({}, read_only={path: {"a": b""}})


def test_read_only_files_in_several_places(factory: BubblewrapFactory):
    mounts = {"/verify": {"a/b": b"1"}, "/data/big": {"c": bytes(3 << 20)}, "/data/other": {"d": b"2"}}
    with factory.create({}, Resources(disk_mb=1), read_only=mounts) as sandbox:
        result = sandbox.exec(["bash", "-c", "cat /verify/a/b /data/other/d; stat -c %s /data/big/c"])
        assert result.stdout == b"123145728\n"


def test_terminal_escapes_and_invalid_text_come_back_as_bytes(sandbox: BubblewrapSandbox):
    result = sandbox.exec(["printf", r"\033[2J\377\000\r"])
    assert result.stdout == b"\x1b[2J\xff\x00\r"
    assert sandbox.commands[-1].stdout_excerpt == "\x1b[2J\ufffd\x00\r"
