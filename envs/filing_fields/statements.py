"""The material of filings: labels with their JSON keys, amounts as filings print them, and tables of them.

An amount is its printed text and its value as a JSON number in full units: "(1,234K)" is -1234e3.
JSON's exponent says the scale with one digit, where zeros would cost a small policy a token each and have to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeVar

import numpy as np

T = TypeVar("T")

LABELS = (
    ("Revenue", "revenue"),
    ("Cash", "cash"),
    ("Net income", "net_income"),
    ("Total assets", "total_assets"),
    ("Total debt", "total_debt"),
    ("Inventory", "inventory"),
    ("Operating income", "operating_income"),
    ("Gross profit", "gross_profit"),
    ("Equity", "equity"),
    ("Goodwill", "goodwill"),
    ("Tax expense", "tax_expense"),
    ("Interest expense", "interest_expense"),
    ("Dividends paid", "dividends_paid"),
    ("Free cash flow", "free_cash_flow"),
    ("Other income", "other_income"),
    ("Depreciation", "depreciation"),
)
SIGNED = frozenset({"net_income", "operating_income", "free_cash_flow", "other_income"})
"""Keys whose amounts may be negative."""
CURRENCIES = ("USD", "EUR", "GBP", "CHF")


@dataclass(frozen=True)
class Amount:
    """An amount as the filing prints it, and what it is worth in full units, as a JSON number: "1,234K" and "1234e3"."""

    text: str
    number: str

    @property
    def value(self) -> Decimal:
        return Decimal(self.number)


@dataclass(frozen=True)
class Row:
    label: str
    key: str
    amount: Amount


@dataclass(frozen=True)
class Field:
    """One requested value, with what the verifier needs to say what went wrong when it isn't met."""

    key: str
    amount: Amount
    other_years: Mapping[str, Decimal] = field(default_factory=dict)


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def pick_some(rng: np.random.Generator, options: Sequence[T], num: int) -> list[T]:
    """`num` different ones, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:num]]


def printed(number: int, exponent: int, suffix: str = "") -> Amount:
    """An integer in the scale that `suffix` prints and `exponent` means: `printed(-1234, 3, "K")` is "(1,234K)", "-1234e3"."""
    text = f"{abs(number):,}{suffix}"
    return Amount(f"({text})" if number < 0 else text, f"{number}e{exponent}" if exponent else f"{number}")


def digits_of(rng: np.random.Generator, at_least: int, at_most: int) -> int:
    """A number of `at_least` to `at_most` digits; each length is as frequent."""
    num_digits = int(rng.integers(at_least, at_most + 1))
    return int(rng.integers(10 ** (num_digits - 1), 10**num_digits))


def layout(header: str, rows: Sequence[tuple[str, str]], currency: str) -> str:
    """The table as text: labels on the left, amounts right-aligned below the header, the currency under both."""
    label_width = max(len(label) for label, _ in rows)
    width = max(len(header), *(len(text) for _, text in rows))
    lines = [f"{label:<{label_width}}  {text:>{width}}" for label, text in [("", header), *rows]]
    return "\n".join([*lines, currency])
