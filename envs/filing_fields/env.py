"""The filing environment: hand in JSON, or look around first.

    ```json                    ```sh
    {"cash": 1200}             cat filing.txt
    ```                        ```

`json` writes its body to `answer.json`, and ends the episode when that is a JSON object; otherwise the observation is
the parser's error. `sh` runs a command; an `answer.json` that it writes counts too when the turns are used up.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from envs.filing_fields.generate import generate
from envs.tool_calls import Tool
from envs.tool_env import Effect, ToolEnv, describe
from postrl.contracts import Sandbox, Task, ToolCall

ANSWER = "answer.json"


class FilingFieldsEnv(ToolEnv):
    """See the module's description and `envs.tool_env.ToolEnv`."""

    domain: ClassVar[str] = "filing_fields"
    tools: ClassVar[tuple[Tool, ...]] = (Tool("json"), Tool("sh"))
    generate = staticmethod(generate)

    def act(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        if call.name == "sh":
            return Effect(describe(sandbox.exec(["bash", "-c", call.body]), task.resources.timeout_s))
        sandbox.put(ANSWER, call.body.encode())
        problem = problem_in(call.body)
        return Effect(f"wrote {ANSWER}", done=True) if problem is None else Effect(problem)


def problem_in(text: str) -> str | None:
    """Why `text` is no JSON object as RFC 8259 has it (no NaN, no key twice), or None."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=str, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        return f"Not JSON: {error.msg}: line {error.lineno} column {error.colno}"
    except ValueError as error:
        return f"Not JSON: {error}"
    except RecursionError:
        return "Not JSON: nested too deeply"
    return None if isinstance(value, dict) else 'Not a JSON object: write {"field": number}'


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value
