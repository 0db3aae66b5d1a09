"""The code-repair environment: rewrite a line, and the visible tests answer.

    ```line 3            ```test          ```sh
    out += x             ```              cat -n total.py
    ```                                   ```

`line N` replaces line N by its body (several lines, or none) and, if that changes it, runs the visible tests. A body that
isn't indented takes over the indentation of the line it replaces, where small policies err most. `test` runs the tests;
`sh` runs a command. The episode ends when the tests pass. They only guide: what counts is the hidden tests, on that file.
"""

from __future__ import annotations

import re
from typing import ClassVar

from envs.code_repair.generate import generate
from envs.tool_calls import Tool
from envs.tool_env import Effect, ToolEnv, describe
from postrl.contracts import ExecResult, Sandbox, Task, ToolCall

MAX_FILE_BYTES = 65_536
_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
_PYTHON = ("python3", "-S", "-B", "-X", "pycache_prefix=/dev/null")
"""Without cached modules: one of a file with equal size and time would be run in place of the edited file."""

_ERROR_LINE = re.compile(r'^ *File ".*", line (\d+)', re.MULTILINE)


class CodeRepairEnv(ToolEnv):
    """See the module's description and `envs.tool_env.ToolEnv`."""

    domain: ClassVar[str] = "code_repair"
    tools: ClassVar[tuple[Tool, ...]] = (Tool("line", ("NUMBER",), body=False), Tool("test", body=False), Tool("sh"))
    generate = staticmethod(generate)

    def act(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        match call.name:
            case "line":
                return _rewrite(call, task, sandbox)
            case "test":
                return _test(task, sandbox)
            case _:
                result = sandbox.exec(["bash", "-c", call.body], env=_ENV)
                return Effect(describe(result, task.resources.timeout_s))


def replace_line(text: str, number: int, body: str) -> str:
    """`text` with line `number` (from 1) replaced by the lines of `body`, or removed when `body` is empty.

    When the body's first line has no indentation, all its lines get that of the old one in addition to their own.
    Raises ValueError when there is no such line.
    """
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if not 1 <= number <= len(lines):
        raise ValueError(f"no line {number}: the file has {len(lines)}")
    new = body.split("\n") if body else []
    if new and not new[0][:1].isspace():
        old = lines[number - 1]
        indentation = old[: len(old) - len(old.lstrip())]
        new = [f"{indentation}{line}" if line.strip() else line for line in new]
    lines[number - 1 : number] = new
    return "".join(f"{line}\n" for line in lines)


def explain(result: ExecResult) -> str:
    """Why the visible tests failed, in the words of their last line of stderr, after whatever they printed."""
    printed = result.stdout.decode(errors="replace").strip()
    if result.killed_by is not None:
        reason = f"killed: {result.killed_by} (an endless loop?)"
    else:
        stderr = result.stderr.decode(errors="replace").strip()
        reason = stderr.rpartition("\n")[2] or f"exit {result.exit_code} before the tests were done"
        places = _ERROR_LINE.findall(stderr)
        if places:
            reason = f"line {places[-1]}: {reason}"
    return f"{printed}\n{reason}".lstrip()


def _rewrite(call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
    path = task.expected["path"]
    number = call.words[0]
    if not re.fullmatch(r"[0-9]{1,6}", number):
        return Effect(f"{number[:16]} is no line number: write ```line 2")
    try:
        data = sandbox.get(path, max_bytes=MAX_FILE_BYTES + 1)
    except (FileNotFoundError, PermissionError):
        return Effect(f"{path} is gone")
    if len(data) > MAX_FILE_BYTES:
        return Effect(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    before = data.decode(errors="replace")
    try:
        text = replace_line(before, int(number), call.body)
    except ValueError as error:
        return Effect(str(error))
    if text == before:
        return Effect(f"line {number} already was so")
    sandbox.put(path, text.encode())
    return _test(task, sandbox)


def _test(task: Task, sandbox: Sandbox) -> Effect:
    result = sandbox.exec([*_PYTHON, f"test_{task.expected['path']}"])
    passed = result.exit_code == 0 and result.stdout.endswith(b"passed\n")
    return Effect("passed", done=True) if passed else Effect(explain(result))
