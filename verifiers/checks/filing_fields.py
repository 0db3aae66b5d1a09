"""Reads an `answer.json` as strict, bounded JSON. Runs in a verifier's sandbox; see verifiers/filing_fields.py.

Nothing is executed and no number is computed with: numbers stay the text that they are written as. Prints one line:
{"problem": null or a sentence, "fields": [[key, type, text], ...]}, with text only for numbers and strings.
"""

import json
import os
import stat

ANSWER = "answer.json"
MAX_BYTES = 4_096
MAX_FIELDS = 32
MAX_KEY_CHARS = 80
MAX_NUMBER_CHARS = 40
MAX_STRING_CHARS = 60


class Number(str):
    """A number as it was written."""


def read(path):
    """The file's text. Raises ValueError, which says what is wrong with it."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise ValueError("is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is no regular file")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"is longer than {MAX_BYTES} bytes")
    with open(path, "rb") as file:
        try:
            return file.read(MAX_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from None


def parse(text):
    """[key, type, text] of each field of the object in `text`. Raises ValueError for anything that isn't one."""
    try:
        value = json.loads(
            text, parse_int=Number, parse_float=Number, parse_constant=refuse_constant, object_pairs_hook=unique
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds {describe(value)[0]}, not an object")
    if len(value) > MAX_FIELDS:
        raise ValueError(f"holds {len(value)} fields, at most {MAX_FIELDS} are read")
    return [[key[:MAX_KEY_CHARS], *describe(item)] for key, item in value.items()]


def refuse_constant(name):
    raise ValueError(f"is not JSON: {name} is no number")


def unique(pairs):
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("is ambiguous: a key occurs twice")
    return value


def describe(value):
    """Type and text of a value."""
    if isinstance(value, Number):
        return ("a number", str(value)) if len(value) <= MAX_NUMBER_CHARS else ("a number of too many digits", "")
    if isinstance(value, str):
        return "a string", value[:MAX_STRING_CHARS]
    if value is None:
        return "null", ""
    return {bool: "a boolean", list: "a list", dict: "an object"}[type(value)], ""


def main():
    try:
        report = {"problem": None, "fields": parse(read("work/" + ANSWER))}
    except ValueError as error:
        report = {"problem": str(error), "fields": []}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
