"""Calls a handed-in function and prints what it returned. Runs in a verifier's sandbox; see verifiers/code_repair.py.

Given: `path`, `function`, `calls` (a list of argument lists), and no answers: from the moment the file is loaded, the
policy's code shares this process and may print whatever it likes. Output, a JSON value a line: "ready" before the file
is loaded, null or what went wrong when loading it, then for each call {"value": ...} or {"error": "..."}.
"""

import json
import os
import sys
import types

MAX_CHARS = 2_000
"""Of one encoded value: no expected answer comes near it."""


def main():
    with open("/verify/given.json", encoding="utf-8") as file:
        given = json.load(file)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the loaded code are not part of the report

    def say(value):
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    say("ready")
    module = types.ModuleType(given["function"])
    sys.modules[given["function"]] = module
    try:
        with open(given["path"], "rb") as file:
            exec(compile(file.read(), given["path"], "exec"), module.__dict__)  # noqa: S102 - what this sandbox is for
        function = getattr(module, given["function"])
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        say(describe(error))
        return
    say(None)
    for args in given["calls"]:
        try:
            value = encode(function(*args))
            if len(json.dumps(value)) > MAX_CHARS:
                raise ValueError("the result is too large")
            say({"value": value})
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            say({"error": describe(error)})


def encode(value):
    """The value in JSON with its exact type: a dict as {"dict": pairs}, anything but plain data as {"other": type}."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and value - value == 0:
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    return {"other": type(value).__name__}


def describe(error):
    place = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}{place}: {text}"[:200]


if __name__ == "__main__":
    main()
