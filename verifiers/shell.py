"""Judges shell tasks by their results: the stdout of the last command, and every file of the work directory.

Which command was used doesn't matter. Right is the expected stdout (lines compared without trailing white space, a
number by its value), the expected contents of the files that the task changes, and every other file as it was, to the
byte; files that nobody asked for are wrong. The reward is 1 or 0.
"""

from __future__ import annotations

from postrl.contracts import Files, SandboxFactory, Task, TaskError, Verdict
from verifiers.checking import load_check, run_check, verdict

CHECK = load_check("shell", __file__, "shell.py")


def verify(task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict:
    """The verdict on a shell episode; see `postrl.contracts.Verifier`.

    Raises TaskError for a task without the domain's expectations or with files that aren't UTF-8.
    """
    try:
        changed = task.expected["changes"]
        given = {
            "stdout": task.expected["stdout"],
            "number": task.expected["number"],
            "changed": changed,
            "untouched": {path: data.decode() for path, data in task.files.items() if path not in changed},
        }
    except (KeyError, UnicodeDecodeError) as error:
        raise TaskError(f"{task.id} can't be judged as a shell task: {error!r}") from error
    return verdict(CHECK, run_check(CHECK, sandboxes, given=given, artifacts=artifacts))
