"""Tables of the report: text on the left, numbers on the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from postrl.report.markup import Html, tag


def table(head: Sequence[str], rows: Iterable[Html], num_text_columns: int = 1) -> Html:
    """A table whose columns after the first `num_text_columns` are numbers."""
    cells = [tag("th", name, class_="num" if index >= num_text_columns else None) for index, name in enumerate(head)]
    wide = "wide" if len(head) > 3 else None
    return tag(
        "div", tag("table", tag("thead", tag("tr", cells)), tag("tbody", list(rows)), class_=wide), class_="scroll"
    )


def row(cells: Sequence[object], *, class_: str | None = None, first_class: str | None = None) -> Html:
    """A row: the first cell is text, the others are numbers."""
    return tag(
        "tr",
        [tag("td", cell, class_="num" if index else first_class) for index, cell in enumerate(cells)],
        class_=class_,
    )
