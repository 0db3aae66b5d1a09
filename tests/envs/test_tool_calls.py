"""The parser of tool calls: the format's examples, each kind of mistake with its exact explanation, and any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tool_calls import MAX_REPLY_CHARS, Malformed, Tool, parse_call
from postrl.contracts import ToolCall

SHELL = (Tool("sh"), Tool("look"))
EDIT = (Tool("line", ("NUMBER",)), Tool("test", body=False))


@pytest.mark.parametrize(
    ("reply", "tools", "call"),
    [
        ("```sh\nls | wc -l\n```", SHELL, ToolCall("sh", (), "ls | wc -l")),
        ("```line 3\n    return a\n```", EDIT, ToolCall("line", ("3",), "    return a")),
        ("I count them.\n\n```sh\nls\n```\nDone.", SHELL, ToolCall("sh", (), "ls")),
        ("```sh\nls", SHELL, ToolCall("sh", (), "ls")),
        ("```sh\nls\n", SHELL, ToolCall("sh", (), "ls")),
        ("``` sh \nls\n```  ", SHELL, ToolCall("sh", (), "ls")),
        ("```sh\na\n\nb\n\n```", SHELL, ToolCall("sh", (), "a\n\nb\n")),
        # The first block that names a tool counts, whatever stands before and after it.
        ("```python\nprint()\n```\n```look\nls\n```\n```sh\nrm x\n```", SHELL, ToolCall("look", (), "ls")),
        # A longer fence holds a shorter one.
        ("````sh\ncat <<E\n```\nE\n````", SHELL, ToolCall("sh", (), "cat <<E\n```\nE")),
        ("```test\n```", EDIT, ToolCall("test", (), "")),
        ("```test", EDIT, ToolCall("test", (), "")),
    ],
)
def test_calls(reply, tools, call):
    assert parse_call(reply, tools) == call


@pytest.mark.parametrize(
    ("reply", "tools", "explanation"),
    [
        ("", SHELL, "No tool call: use ```sh or ```look."),
        ("ls | wc -l", SHELL, "No tool call: use ```sh or ```look."),
        ("Run `sh` or ```sh ls```.", SHELL, "No tool call: use ```sh or ```look."),
        ("```\nls\n```", SHELL, "The block names no tool: use ```sh or ```look."),
        ("```bash\nls\n```", SHELL, "No tool bash: use ```sh or ```look."),
        ("```shell\nls\n```", SHELL, "No tool shell: use ```sh or ```look."),
        ("```" + "x" * 99 + "\nls\n```", SHELL, "No tool xxxxxxxxxxxxxxxx: use ```sh or ```look."),
        ("```sh ls\n```", SHELL, "Wrong words after sh: write ```sh"),
        ("```line\nx\n```", EDIT, "Wrong words after line: write ```line NUMBER"),
        ("```line 1 2\nx\n```", EDIT, "Wrong words after line: write ```line NUMBER"),
        ("```sh\n \n```", SHELL, "The sh block is empty."),
        ("```sh\n```", SHELL, "The sh block is empty."),
        ("```sh\necho \0\n```", SHELL, "The reply holds a NUL or a broken character."),
        ("```sh\necho \ud800\n```", SHELL, "The reply holds a NUL or a broken character."),
        ("```sh\n" + "a" * MAX_REPLY_CHARS, SHELL, "The reply is too long: 16390 characters, at most 16384."),
    ],
)
def test_mistakes(reply, tools, explanation):
    assert parse_call(reply, tools) == Malformed(explanation)


@given(st.text() | st.text(alphabet="`sh look\n x3"))
def test_any_text_is_a_call_or_a_short_explanation(reply):
    parsed = parse_call(reply, SHELL)
    if isinstance(parsed, Malformed):
        assert parsed.explanation
        assert len(parsed.explanation) <= 100
    else:
        assert parsed.name in ("sh", "look")
        assert parsed.body.strip()


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_body_between_fences_longer_than_its_own_is_kept(body):
    fence = "`" * (3 + len(body))
    parsed = parse_call(f"{fence}sh\n{body}\n{fence}", SHELL)
    assert parsed == (ToolCall("sh", (), body) if body.strip() else Malformed("The sh block is empty."))
