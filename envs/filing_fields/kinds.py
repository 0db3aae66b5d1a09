"""The kinds of filing tasks: tables and notes out of which fields are asked.

- plain: one field of a table in full units
- scale: the header says thousands or millions
- negative: the amount stands in parentheses
- year: either of two years, the newest first or last; the tables of all other kinds have one year
- ratio: a table of percents or basis points, asked as fractions
- note: prose ("a net loss of $1.2 million")
- two_fields: two fields of a table in full units
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np

from envs.filing_fields.statements import (
    CURRENCIES,
    LABELS,
    RATIOS,
    SIGNED,
    Amount,
    Field,
    Row,
    basis_points,
    digits_of,
    layout,
    percent,
    pick,
    pick_some,
    printed,
)

_COMPANIES = ("Orion", "Acme", "Delta", "Vertex", "Nova", "Summit", "Harbor", "Atlas", "Cobalt", "Juniper", "Lumen")
_UNSIGNED_LABELS = tuple(label for label in LABELS if label[1] not in SIGNED)
_SIGNED_LABELS = tuple(label for label in LABELS if label[1] in SIGNED)


@dataclass(frozen=True)
class Problem:
    """A filing, the year that is asked, the fields, and other values of the filing by their keys."""

    filing: str
    year: str
    fields: tuple[Field, ...]
    others: dict[str, Decimal]


@dataclass(frozen=True)
class _Unit:
    """How numbers are printed."""

    name: str
    """As it follows the currency in a header, or the number in prose; empty for full units."""
    exponent: int
    """A printed number is multiplied by ten to the power of it."""
    num_decimals: int
    num_digits: tuple[int, int]


_FULL = _Unit("", 0, 0, (4, 5))
_SHORT = _Unit("", 0, 0, (3, 4))
_SCALED = (
    _Unit(" in thousands", 3, 0, (2, 4)),
    _Unit(" in millions", 6, 0, (2, 4)),
    _Unit(" in millions", 6, 1, (2, 3)),
)
_PROSE = (_FULL, _Unit(" thousand", 3, 0, (2, 3)), _Unit(" million", 6, 1, (2, 3)))


def plain(rng: np.random.Generator) -> Problem:
    return _table(rng, _FULL, [_row(rng, label, _FULL) for label in pick_some(rng, LABELS, 3)])


def scale(rng: np.random.Generator) -> Problem:
    unit = pick(rng, _SCALED)
    return _table(rng, unit, [_row(rng, label, unit) for label in pick_some(rng, LABELS, 3)])


def negative(rng: np.random.Generator) -> Problem:
    unit = pick(rng, (_FULL, _SCALED[0], _SCALED[1]))
    asked = _row(rng, pick(rng, _SIGNED_LABELS), unit, negative=True)
    return _table(rng, unit, [asked, *(_row(rng, label, unit) for label in pick_some(rng, _UNSIGNED_LABELS, 2))])


def year(rng: np.random.Generator) -> Problem:
    rows = [_row(rng, label, _FULL) for label in pick_some(rng, LABELS, 3)]
    return _table(rng, _FULL, rows, column=int(rng.integers(2)), newest_first=bool(rng.integers(2)))


def ratio(rng: np.random.Generator) -> Problem:
    style = pick(rng, ("bps", "whole", "decimal"))
    return _table(rng, _FULL, [_ratio_row(rng, label, style) for label in pick_some(rng, RATIOS, 3)])


def two_fields(rng: np.random.Generator) -> Problem:
    rows = [_row(rng, label, _SHORT) for label in pick_some(rng, _UNSIGNED_LABELS, 3)]
    return _table(rng, _SHORT, rows, num_asked=2)


def note(rng: np.random.Generator) -> Problem:
    """Two sentences with three amounts; asked is the result of either year, or what the second sentence says."""
    years = _years(rng)
    currency, is_loss = pick(rng, "$€£"), bool(rng.integers(2))
    unit = pick(rng, _PROSE)
    now, before = (_worded(rng, currency, unit, negative=is_loss) for _ in range(2))
    third = _worded(rng, currency, pick(rng, _PROSE), negative=False)
    label, key = pick(rng, _UNSIGNED_LABELS)
    text = (
        f"{pick(rng, _COMPANIES)} had a net {'loss' if is_loss else 'income'} of {now.text} in {years[0]} "
        f"and of {before.text} in {years[1]}. {label} was {third.text} in {years[0]}."
    )
    asked = rng.integers(3)
    if asked == 2:
        return Problem(text, years[0], (Field(key, third, {}),), {"net_income": now.value})
    amount, other = (now, before) if asked == 0 else (before, now)
    field = Field("net_income", amount, {years[1 - asked]: other.value})
    return Problem(text, years[asked], (field,), {key: third.value})


KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {
    function.__name__: function for function in (plain, scale, negative, year, ratio, note, two_fields)
}


def _years(rng: np.random.Generator) -> tuple[str, str]:
    newest = int(rng.integers(2015, 2026))
    return str(newest), str(newest - 1)


def _row(rng: np.random.Generator, label: tuple[str, str], unit: _Unit, *, negative: bool | None = None) -> Row:
    """A row of two amounts. `negative`: both are; None: either may be, where the label allows it."""
    amounts = []
    for _ in range(2):
        digits = digits_of(rng, *unit.num_digits)
        is_negative = label[1] in SIGNED and rng.random() < 0.2 if negative is None else negative
        amounts.append(printed(-digits if is_negative else digits, unit.num_decimals, unit.exponent))
    return Row(*label, tuple(amounts))


def _ratio_row(rng: np.random.Generator, label: tuple[str, str], style: str) -> Row:
    if style == "bps":
        amounts = [basis_points(int(rng.integers(5, 400))) for _ in range(2)]
    elif style == "whole":
        amounts = [percent(int(rng.integers(2, 60)), 0) for _ in range(2)]
    else:
        amounts = [percent(int(rng.integers(11, 600)), 1) for _ in range(2)]
    return Row(*label, tuple(amounts))


def _worded(rng: np.random.Generator, currency: str, unit: _Unit, *, negative: bool) -> Amount:
    """An amount as prose has it: "$1.2 million", "€340 thousand", "$48,210". A loss is named there, not signed."""
    amount = printed(digits_of(rng, *unit.num_digits), unit.num_decimals, unit.exponent)
    return Amount(f"{currency}{amount.text}{unit.name}", f"{'-' if negative else ''}{amount.number}")


def _table(
    rng: np.random.Generator,
    unit: _Unit,
    rows: Sequence[Row],
    *,
    num_asked: int = 1,
    column: int | None = None,
    newest_first: bool = True,
) -> Problem:
    """A table of the `rows` in random order; asked are the first `num_asked` of `rows`, for the year in `column`.

    None: the table has one year.
    """
    years = _years(rng) if newest_first else _years(rng)[::-1]
    if column is None:
        column, years, rows = 0, years[:1], [replace(row, amounts=row.amounts[:1]) for row in rows]
    fields = tuple(
        Field(
            row.key,
            row.amounts[column],
            {y: a.value for y, a in zip(years, row.amounts, strict=True) if y != years[column]},
        )
        for row in rows[:num_asked]
    )
    others = {row.key: row.amounts[column].value for row in rows[num_asked:]}
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    return Problem(layout(f"{pick(rng, CURRENCIES)}{unit.name}", years, shuffled), years[column], fields, others)
