"""Compares what a shell episode left with what it should have. Runs in a verifier's sandbox: verifiers/checking.py.

Given: `stdout` (text or null), `number` (bool), `changed` (path -> text or null: gone), `untouched` (path -> text).
Reads `stdout`, `left_out` and `work/` in the work directory, as data only.
"""

import json
import os
import re

NUMBER = re.compile(r"([+-]?)0*(\d{1,40})(?:\.(\d{1,40}))?")


def main() -> None:
    with open("/verify/given.json", encoding="utf-8") as file:
        given = json.load(file)
    found = read_tree()
    wrong = {}
    parts = {}
    if given["stdout"] is not None:
        parts["stdout"] = 1.0
        problem = compare_stdout(given["stdout"], read("stdout"), given["number"])
        if problem:
            wrong["stdout"] = problem
    for path, text in given["changed"].items():
        parts[path] = 1.0
        problem = compare_changed(text, found.get(path))
        if problem:
            wrong[path] = problem
    parts["other files"] = 1.0
    problem = compare_others(given, found)
    if problem:
        wrong["other files"] = problem
    parts.update(dict.fromkeys(wrong, 0.0))
    print(json.dumps({"nonce": given["nonce"], "parts": parts, "findings": list(wrong.items())}))


def read_tree():
    """Path below `work` -> bytes."""
    found = {}
    for directory, _, names in os.walk("work"):
        for name in names:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, "work")] = read(path)
    return found


def read(path):
    """The file's bytes, empty where there is none."""
    if not os.path.lexists(path):
        return b""
    with open(path, "rb") as file:
        return file.read()


def lines(data):
    """Lines without trailing white space, and without empty lines at the end: what a person sees."""
    found = [line.rstrip() for line in data.decode("utf-8", "replace").split("\n")]
    while found and not found[-1]:
        found.pop()
    return found


def compare_stdout(expected, data, is_number):
    """What is wrong with stdout, or None."""
    wanted, got = lines(expected.encode()), lines(data)
    if not got:
        return f"expected {short(wanted)}, got nothing"
    if is_number:
        value = number("\n".join(got))
        same = value is not None and value == number("\n".join(wanted))
    else:
        same = got == wanted
    return None if same else f"expected {short(wanted)}, got {short(got)}"


def number(text):
    """A decimal number's canonical text, or None: `+012.50` and `12.5` are the same, `12 notes.txt` is none."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    fraction = (match.group(3) or "").rstrip("0")
    sign = "-" if match.group(1) == "-" and (match.group(2) != "0" or fraction) else ""
    return sign + match.group(2) + ("." + fraction if fraction else "")


def compare_changed(expected, data):
    """What is wrong with a file that the task changes, or None."""
    if expected is None:
        return None if data is None else "should be gone, is still there"
    if data is None:
        return "is missing"
    wanted, got = lines(expected.encode()), lines(data)
    return None if wanted == got else f"expected {short(wanted)}, got {short(got)}"


def compare_others(given, found):
    """What is wrong with the rest: other files must be there, unchanged to the byte, and no new ones."""
    if os.path.lexists("left_out"):
        return f"too much to hand in: {read('left_out').decode('utf-8', 'replace')[:200]}"
    for path, text in given["untouched"].items():
        if path not in found:
            return f"{path} is missing, it was not to be touched"
        if found[path] != text.encode():
            return f"{path} was changed, it was not to be touched"
    for path in sorted(found):
        if path not in given["untouched"] and path not in given["changed"]:
            return f"{ascii(path)[:80]} was not asked for"
    return None


def short(text_lines):
    """Lines for a message: quoted, escaped, and cut."""
    text = ascii("\n".join(text_lines))[1:-1]
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text_lines)} lines)"


if __name__ == "__main__":
    main()
