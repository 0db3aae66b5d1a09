"""The material of filings: labels with their JSON keys, amounts as filings print them, and tables of them.

An amount is its printed text and its value as a JSON number in full units: "(1,234)" under "in thousands" is -1234e3.
JSON's exponent says the scale with one digit, where zeros would cost a small policy a token each and have to be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
RATIOS = (
    ("Gross margin", "gross_margin"),
    ("Tax rate", "tax_rate"),
    ("Interest rate", "interest_rate"),
    ("Churn rate", "churn_rate"),
    ("Credit spread", "credit_spread"),
    ("Dividend yield", "dividend_yield"),
)
CURRENCIES = ("USD", "EUR", "GBP", "CHF")


@dataclass(frozen=True)
class Amount:
    """An amount as the filing prints it, and what it is worth in full units, as a JSON number: "45 bps" and "45e-4"."""

    text: str
    number: str

    @property
    def value(self) -> Decimal:
        return Decimal(self.number)


@dataclass(frozen=True)
class Row:
    """One row of a table: an amount for each of its years."""

    label: str
    key: str
    amounts: tuple[Amount, ...]


@dataclass(frozen=True)
class Field:
    """One requested value, with what the verifier needs to say what went wrong when it isn't met."""

    key: str
    amount: Amount
    other_years: dict[str, Decimal]


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def pick_some(rng: np.random.Generator, options: Sequence[T], num: int) -> list[T]:
    """`num` different ones, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:num]]


def printed(digits: int, num_decimals: int, exponent: int) -> Amount:
    """The amount with the digits of the integer `digits`: `printed(-12345, 1, 3)` is "(1,234.5)" and "-1234.5e3"."""
    number = Decimal(digits).scaleb(-num_decimals)
    text = f"{abs(number):,}"
    return Amount(f"({text})" if digits < 0 else text, f"{number}e{exponent}" if exponent else f"{number}")


def percent(digits: int, num_decimals: int) -> Amount:
    """`percent(125, 1)` is "12.5%" and "12.5e-2"."""
    number = Decimal(digits).scaleb(-num_decimals)
    return Amount(f"{number}%", f"{number}e-2")


def basis_points(digits: int) -> Amount:
    """`basis_points(45)` is "45 bps" and "45e-4"."""
    return Amount(f"{digits} bps", f"{digits}e-4")


def digits_of(rng: np.random.Generator, at_least: int, at_most: int) -> int:
    """A number of `at_least` to `at_most` digits; each length is as frequent."""
    num_digits = int(rng.integers(at_least, at_most + 1))
    return int(rng.integers(10 ** (num_digits - 1), 10**num_digits))


def layout(header: str, years: Sequence[str], rows: Sequence[Row]) -> str:
    """The table as text: the header, then labels on the left and right-aligned columns."""
    label_width = max(len(row.label) for row in rows)
    widths = [max(len(year), *(len(row.amounts[i].text) for row in rows)) for i, year in enumerate(years)]
    lines = [" " * label_width + "".join(f"  {year:>{width}}" for year, width in zip(years, widths, strict=True))]
    for row in rows:
        cells = "".join(f"  {amount.text:>{width}}" for amount, width in zip(row.amounts, widths, strict=True))
        lines.append(f"{row.label:<{label_width}}{cells}")
    return "\n".join([header, *lines])
