"""The kinds of filing tasks: tables and notes out of which fields are asked.

- plain, negative: one field of a table in full units, positive or in parentheses
- thousands, millions: one field of a table with both ("34K", "56M")
- profit, loss: prose ("a net loss of $12,345")
- year: one field over three years, of which one is asked by its number
- two_fields: two fields of a table in full units

Signs and scales come in pairs of kinds that differ in nothing else: an answer that takes all amounts for positive, or all for
thousands, gains in one kind what it loses in the other. It pays no more than half, wherever in an answer an amount stands.
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
_THOUSANDS, _MILLIONS = _Unit("K", 3, (2, 2)), _Unit("M", 6, (2, 2))


def plain(rng: np.random.Generator) -> Problem:
    return _table(rng, [_row(rng, label, _FULL) for label in _labels(rng)])


def negative(rng: np.random.Generator) -> Problem:
    asked, *others = _labels(rng)
    return _table(rng, [_row(rng, asked, _FULL, negative=True), *(_row(rng, label, _FULL) for label in others)])


def thousands(rng: np.random.Generator) -> Problem:
    return _scaled(rng, _THOUSANDS, _MILLIONS)


def millions(rng: np.random.Generator) -> Problem:
    return _scaled(rng, _MILLIONS, _THOUSANDS)


def profit(rng: np.random.Generator) -> Problem:
    return _note(rng, is_loss=False)


def loss(rng: np.random.Generator) -> Problem:
    return _note(rng, is_loss=True)


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


KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {
    function.__name__: function for function in (negative, loss, thousands, millions, plain, profit, year, two_fields)
}


def _newest_year(rng: np.random.Generator) -> int:
    return int(rng.integers(2015, 2026))


def _labels(rng: np.random.Generator) -> list[tuple[str, str]]:
    """Three, of which the first may have negative amounts."""
    return [pick(rng, _SIGNED_LABELS), *pick_some(rng, _UNSIGNED_LABELS, 2)]


def _row(rng: np.random.Generator, label: tuple[str, str], unit: _Unit, *, negative: bool = False) -> Row:
    digits = digits_of(rng, *unit.num_digits)
    return Row(*label, printed(-digits if negative else digits, unit.exponent, unit.name))


def _scaled(rng: np.random.Generator, asked: _Unit, other: _Unit) -> Problem:
    """A table with amounts in two units, of which one in `asked` is asked."""
    units = [asked, other, pick(rng, (asked, other))]
    return _table(rng, [_row(rng, *row) for row in zip(pick_some(rng, _UNSIGNED_LABELS, 3), units, strict=True)])


def _note(rng: np.random.Generator, *, is_loss: bool) -> Problem:
    """A sentence with the result of a year. A loss is named, not signed: it is a negative income."""
    year, company, kind = str(_newest_year(rng)), pick(rng, _COMPANIES), "loss" if is_loss else "income"
    amount = printed(digits_of(rng, *_FULL.num_digits), _FULL.exponent)
    text = f"{pick(rng, '$€£')}{amount.text}"
    sentence = pick(
        rng,
        (
            f"In {year} {company} had a net {kind} of {text}.",
            f"{company} reported a net {kind} of {text} for {year}.",
        ),
    )
    result = Amount(text, f"{'-' if is_loss else ''}{amount.number}")
    return Problem(sentence, year, (Field("net_income", result),), {})


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
