"""How a reply calls a tool, and the parser for it.

A reply is free text. The first fenced block whose info string begins with a tool's name is the call:

    ```sh                      ```line 3
    ls | wc -l                     return a
    ```                        ```

    ToolCall("sh", (), "ls | wc -l")          ToolCall("line", ("3",), "    return a")

Fenced blocks, and not JSON, because they cost about six tokens, need no escaping of quotes and newlines (where small
policies fail first), and even small base models write them unasked. Blocks with other info strings (an example in
Python, say) are passed over, further calls in the same reply are ignored, and the closing fence may be missing at the
end of the reply. A body that holds a fence of its own is written between longer fences, as in CommonMark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from postrl.contracts import ToolCall

MAX_REPLY_CHARS = 16_384
"""Longer replies are malformed. A body of that length in UTF-8 still fits into one argument of a command (128 KiB)."""

_OPENING = re.compile(r"^ {0,3}(`{3,})([^`\n]*)$", re.MULTILINE)
_MAX_ECHO_CHARS = 16


@dataclass(frozen=True)
class Tool:
    """One tool, as far as the parser needs to know it."""

    name: str
    words: tuple[str, ...] = ()
    """Names of the words that must follow the tool's name, as an explanation shows them: `("NUMBER",)`."""
    body: bool = True
    """Whether the block must hold something. If False, the body may be empty and the tool decides what it means."""


@dataclass(frozen=True)
class Malformed:
    """The reply calls no tool. `explanation` is one short sentence for the policy: every token of it costs."""

    explanation: str


def parse_call(reply: str, tools: Sequence[Tool]) -> ToolCall | Malformed:
    """The tool call in `reply`, or what is wrong with it. Never raises, whatever the text."""
    if len(reply) > MAX_REPLY_CHARS:
        return Malformed(f"The reply is too long: {len(reply)} characters, at most {MAX_REPLY_CHARS}.")
    if not is_text(reply) or "\0" in reply:
        return Malformed("The reply holds a NUL or a broken character.")
    by_name = {tool.name: tool for tool in tools}
    unknown = None
    num_blocks = 0
    for opening in _OPENING.finditer(reply):
        words = opening[2].split()
        if not words:
            num_blocks += 1
            continue
        tool = by_name.get(words[0])
        if tool is not None:
            return _checked(tool, tuple(words[1:]), _body(reply[opening.end() + 1 :], fence=opening[1]))
        unknown = unknown or words[0]
    use = "use " + " or ".join(f"```{tool.name}" for tool in tools) + "."
    if unknown is not None:
        return Malformed(f"No tool {unknown[:_MAX_ECHO_CHARS]}: {use}")
    return Malformed(f"The block names no tool: {use}" if num_blocks else f"No tool call: {use}")


def is_text(value: str) -> bool:
    """Whether `value` can be written as UTF-8, that is, holds no lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _body(rest: str, fence: str) -> str:
    """What stands before the closing fence, or all of `rest` when there is none; without the last newline."""
    closing = re.search(rf"^ {{0,3}}`{{{len(fence)},}}[ \t]*$", rest, re.MULTILINE)
    return (rest[: closing.start()] if closing else rest).removesuffix("\n")


def _checked(tool: Tool, words: tuple[str, ...], body: str) -> ToolCall | Malformed:
    if len(words) != len(tool.words):
        usage = f"```{' '.join((tool.name, *tool.words))}"
        return Malformed(f"Wrong words after {tool.name}: write {usage}")
    if tool.body and not body.strip():
        return Malformed(f"The {tool.name} block is empty.")
    return ToolCall(tool.name, words, body)
