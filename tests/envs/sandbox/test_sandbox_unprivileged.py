"""The same sandboxes for a user who isn't root. As root: in a process that gives up every privilege first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
UID = 54_321

PROGRAM = """
import json, os, sys, threading
sys.path.insert(0, sys.argv[1])
import envs.sandbox.bubblewrap as bubblewrap
from postrl.contracts import Resources
import numpy.linalg
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
os.chdir("/")
sys.executable = sys.argv[3]
factory = bubblewrap.BubblewrapFactory()
facts = {"uid": os.getuid(), "user": factory.describe()["user"]}
FORKS = '''
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
'''
MEMORY = '''
import os, time
for _ in range(40):
    if os.fork() == 0:
        block = bytearray(40 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(60)
time.sleep(60)
'''
resources = Resources(num_processes=10, disk_mb=2, memory_mb=64)
with factory.create({"a/b.txt": b"1"}, resources, read_only={"/verify": {"c": b"2"}}) as sandbox:
    def say(script, **options):
        result = sandbox.exec(["bash", "-c", script], **options)
        return [result.exit_code, result.killed_by, result.stdout.decode()]
    facts["id"] = say("id -u; id -g; grep -c 0000000000000000 /proc/self/status; grep NoNewPrivs /proc/self/status")
    facts["files"] = say("cat a/b.txt /verify/c; touch new; ls -A")
    facts["read only"] = say("echo x > /verify/c || chmod 777 /verify/c || rm -f /verify/c || touch /usr/x")[0]
    sandbox.exec(["mkdir", "-m", "0", "dark"])
    sandbox.exec(["ln", "-s", "/etc", "link"])
    sandbox.put("a/put.txt", b"3", 0o600)
    facts["list"] = sandbox.list()
    facts["put"] = say("cat a/put.txt; stat -c '%a %U' a/put.txt")
    sandbox.exec(["bash", "-c", "chmod 000 /work /tmp"])
    facts["closed"] = [sandbox.list(), sandbox.get("a/b.txt").decode()]
    facts["forks"] = [sandbox.exec(["python3", "-c", FORKS]).stdout.decode() for _ in range(2)]
    facts["disk"] = say("head -c 3M /dev/zero > big || test $(stat -c %s big) -le 2097152 && echo full")[2]
    facts["survivors"] = say("setsid sleep 600 & sleep 0.05; exit 4")[0]
    facts["timeout"] = say("sleep 600", timeout_s=0.2)[1]
with factory.create({}, Resources(memory_mb=64, disk_mb=1)) as sandbox:
    facts["memory"] = sandbox.exec(["python3", "-c", MEMORY], timeout_s=60).killed_by
with factory.create({}) as sandbox:
    ran = []
    thread = threading.Thread(target=lambda: ran.append(sandbox.exec(["true"])))
    thread.start()
    thread.join()
    facts["thread"] = [result.exit_code for result in ran]
factory.close()
print(json.dumps(facts))
"""


@pytest.fixture
def readable_copy() -> Iterator[Path]:
    """What the process imports: the checkout itself may lie where only its owner may look."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(REPOSITORY / "envs" / "sandbox", Path(folder, "envs", "sandbox"))
        os.mkdir(Path(folder, "postrl"))
        shutil.copy(REPOSITORY / "postrl" / "contracts.py", Path(folder, "postrl"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Path(folder)


def python_for_everyone() -> str:
    """A Python that the unprivileged user can start: ours may lie in root's home."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        options = {"user": UID, "group": UID, "extra_groups": []} if os.geteuid() == 0 else {}
        try:
            check = "import ctypes, json, sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([candidate, "-I", "-S", "-c", check], **options).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.skip("no Python >= 3.11 here that a user without privileges can run")


def test_without_root(readable_copy: Path):
    command = [sys.executable, "-c", PROGRAM, str(readable_copy), str(UID), python_for_everyone()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.pop("uid") == (UID if os.geteuid() == 0 else os.getuid())
    assert facts.pop("user") == "the caller's user, in a user namespace"
    assert facts.pop("id")[2].split("\n")[:2] == ["1000", "1000"]
    assert facts == {
        "files": [0, None, "12a\nnew\n"],
        "read only": 1,
        "list": ["a/b.txt", "a/put.txt", "new"],
        "put": [0, None, "3600 user\n"],
        "closed": [["a/b.txt", "a/put.txt", "new"], "1"],
        "forks": ["9\n", "9\n"],
        "disk": "full\n",
        "survivors": 4,
        "timeout": "timeout",
        "memory": "memory",
        "thread": [0],
    }
