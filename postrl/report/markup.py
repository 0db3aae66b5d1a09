"""HTML and SVG elements in which every text is escaped by construction.

`tag("td", text)` escapes `text` because it is a `str`; only `Html`, which `tag` itself returns, goes in as it is. What
a policy wrote therefore can't become markup, wherever it is shown.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"meta", "br", "hr"})
# Characters that a reader can't see or that reorder what he sees: controls, zero-width and bidirectional marks, lone
# surrogates, private use.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f"
    "\u3164\ud800-\udfff\ue000-\uf8ff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


class Html(str):
    """Markup that is safe to insert as it is."""

    __slots__ = ()


def visible(text: str) -> str:
    """`text` with every character that can't be seen spelled out: `\\x1b` becomes `␛`, U+202E becomes `⟨U+202E⟩`."""

    def spell(match: re.Match[str]) -> str:
        code = ord(match.group())
        if code < 0x20:
            return chr(0x2400 + code)
        return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"

    return _UNSEEN.sub(spell, text)


def escaped(text: str) -> Html:
    """`text` as it should be read, as HTML."""
    return Html(html.escape(visible(text), quote=True))


def joined(children: Iterable[object]) -> Html:
    """Children one after the other: `Html` as it is, strings escaped, None left out, lists flattened."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escaped(child))
        elif isinstance(child, Iterable):
            parts.append(joined(child))
        else:
            raise TypeError(f"{type(child).__name__} {child!r} in HTML: format numbers where their unit is known")
    return Html("".join(parts))


def tag(name: str, /, *children: object, **attributes: str | int | float | None) -> Html:
    """One element. `class_` is class, other underscores are dashes; an attribute of None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")
