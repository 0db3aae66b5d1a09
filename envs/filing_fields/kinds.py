"""The kinds of filing tasks: tables and notes out of which fields are asked.

- plain: one field of a table in full units
- scale: two fields, one in thousands and one in millions ("34K", "56M")
- negative: two fields, one of which stands in parentheses
- year: one field over three years, of which one is asked by its number
- note: prose ("a net loss of $12M")
- two_fields: two fields of a table in full units

Tables of signs and scales hold both cases: an answer that follows the more frequent one everywhere gets nothing, so that a
policy cannot settle on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from envs.filing_fields.statements import (
    CURRENCIES,
    LABELS,
    SIGNED,
    Amount,
    Field,
    Row,
    digits_of,
    layout,
    pick,
    pick_some,
    printed,
)

_COMPANIES = ("Orion", "Acme", "Delta", "Vertex", "Nova", "Summit", "Harbor", "Atlas", "Cobalt", "Juniper", "Lumen")
_UNSIGNED_LABELS = tuple(label for label in LABELS if label[1] not in SIGNED)
_SIGNED_LABELS = tuple(label for label in LABELS if label[1] in SIGNED)


@dataclass(frozen=True)
class Problem:
    """A filing, what all its fields are of, the fields that are asked, and the filing's other values by their keys."""

    filing: str
    subject: str
    """The year; where the fields are years, the label."""
    fields: tuple[Field, ...]
    others: dict[str, Decimal]


@dataclass(frozen=True)
class _Unit:
    """How numbers are printed."""

    name: str
    """As it follows the number; empty for full units."""
    exponent: int
    """A printed number is multiplied by ten to the power of it."""
    num_digits: tuple[int, int]


_FULL = _Unit("", 0, (4, 5))
_SHORT = _Unit("", 0, (3, 4))
_SCALED = (_Unit("K", 3, (2, 2)), _Unit("M", 6, (2, 2)))


def plain(rng: np.random.Generator) -> Problem:
    return _table(rng, [_row(rng, label, _FULL) for label in pick_some(rng, LABELS, 3)])


def scale(rng: np.random.Generator) -> Problem:
    labels = pick_some(rng, _UNSIGNED_LABELS, 3)
    units = [*pick_some(rng, _SCALED, 2), pick(rng, _SCALED)]
    return _table(rng, [_row(rng, *row) for row in zip(labels, units, strict=True)], num_asked=2)


def negative(rng: np.random.Generator) -> Problem:
    below = _row(rng, pick(rng, _SIGNED_LABELS), _SHORT, negative=True)
    above, other = (_row(rng, label, _SHORT) for label in pick_some(rng, _UNSIGNED_LABELS, 2))
    return _table(rng, [*pick_some(rng, [below, above], 2), other], num_asked=2)


def year(rng: np.random.Generator) -> Problem:
    newest, (label, key) = _newest_year(rng), pick(rng, LABELS)
    amounts = {str(newest - i): _row(rng, (label, key), _FULL).amount for i in range(3)}
    asked = pick(rng, list(amounts))
    return Problem(
        layout(label, [(year, amount.text) for year, amount in amounts.items()], pick(rng, CURRENCIES)),
        label,
        (Field(asked, amounts[asked], {year: amount.value for year, amount in amounts.items() if year != asked}),),
        {},
    )


def two_fields(rng: np.random.Generator) -> Problem:
    rows = [_row(rng, label, _SHORT) for label in pick_some(rng, _UNSIGNED_LABELS, 3)]
    return _table(rng, rows, num_asked=2)


def note(rng: np.random.Generator) -> Problem:
    """A sentence with the result of a year: a loss is a negative income."""
    year, is_loss, unit = str(_newest_year(rng)), bool(rng.integers(2)), pick(rng, _SCALED)
    result = _worded(rng, pick(rng, "$€£"), unit, negative=is_loss)
    company, kind = pick(rng, _COMPANIES), "loss" if is_loss else "income"
    text = pick(
        rng,
        (
            f"In {year} {company} had a net {kind} of {result.text}.",
            f"{company} reported a net {kind} of {result.text} for {year}.",
        ),
    )
    return Problem(text, year, (Field("net_income", result),), {})


KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {
    function.__name__: function for function in (plain, scale, negative, year, note, two_fields)
}


def _newest_year(rng: np.random.Generator) -> int:
    return int(rng.integers(2015, 2026))


def _row(rng: np.random.Generator, label: tuple[str, str], unit: _Unit, *, negative: bool | None = None) -> Row:
    """A row with an amount. `negative`: whether it is; None: it may be, where the label allows it."""
    digits = digits_of(rng, *unit.num_digits)
    is_negative = label[1] in SIGNED and rng.random() < 0.2 if negative is None else negative
    return Row(*label, printed(-digits if is_negative else digits, unit.exponent, unit.name))


def _worded(rng: np.random.Generator, currency: str, unit: _Unit, *, negative: bool) -> Amount:
    """An amount as prose has it: "$12M", "€34K". A loss is named there, not signed."""
    amount = printed(digits_of(rng, *unit.num_digits), unit.exponent, unit.name)
    return Amount(f"{currency}{amount.text}", f"{'-' if negative else ''}{amount.number}")


def _table(rng: np.random.Generator, rows: Sequence[Row], *, num_asked: int = 1) -> Problem:
    """A table of the `rows` of one year in random order; asked are the first `num_asked` of `rows`."""
    asked_year = str(_newest_year(rng))
    shuffled = [(rows[i].label, rows[i].amount.text) for i in rng.permutation(len(rows))]
    return Problem(
        layout(asked_year, shuffled, pick(rng, CURRENCIES)),
        asked_year,
        tuple(Field(row.key, row.amount) for row in rows[:num_asked]),
        {row.key: row.amount.value for row in rows[num_asked:]},
    )
