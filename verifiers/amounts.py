"""Reads amounts as people and filings write them, exactly: "(1,234)", "$1.5M", "12.5%", "1.2bn", "45 bps".

The locale is declared, never guessed: "1.234" is over a thousand in `de`, and less than two in `en`. What has two
readings or isn't one amount ("5 cm", "5 m", "2 or 3", "1,23", percentage points) is refused. Percent and basis points
give fractions. There are no floats, no rounding and no tolerance: "0.004" is not "0.001".
"""

from __future__ import annotations

import re
from decimal import Decimal
from types import MappingProxyType

LOCALES = MappingProxyType({"en": (",", "."), "de": (".", ","), "fr": (" ", ","), "ch": ("'", ".")})
"""Locale -> the signs that group thousands and that begin the decimals."""

MAX_CHARS = 60

_EXPONENTS = MappingProxyType(
    {
        "": 0,
        "k": 3,
        "thousand": 3,
        "m": 6,
        "mn": 6,
        "million": 6,
        "b": 9,
        "bn": 9,
        "billion": 9,
        "tn": 12,
        "trillion": 12,
    }
    | {"%": -2, "percent": -2, "bp": -4, "bps": -4, "basis points": -4}
)
_SPACES = re.compile("[\u00a0\u2007\u2009\u202f\t\n ]+")
_CURRENCY = r"(?:US\$|[$€£¥]|USD|EUR|GBP|CHF|JPY)"
_SHAPE = re.compile(
    rf"""(?P<open>\()?  (?P<sign>[+-])?  (?P<before>{_CURRENCY})?[ ]?
         (?P<inner_open>\()?  (?P<inner_sign>[+-])?
         (?P<number>[0-9][0-9., ']*?)  (?:e(?P<exponent>[+-]?[0-9]{{1,2}}))?
         (?P<inner_close>\))?
         [ ]?(?P<suffix>{"|".join(re.escape(name) for name in _EXPONENTS)})
         [ ]?(?P<after>{_CURRENCY})?  (?P<close>\))?""",
    re.VERBOSE | re.IGNORECASE,
)


def read_amount(text: str, locale: str = "en") -> Decimal:
    """The exact value of an amount: -1234 for "(1,234)", 1500000 for "$1.5M", 0.125 for "12.5%".

    Parentheses around all of it, or around the number, make it negative, as in a balance sheet. Raises ValueError when
    `text` is not exactly one amount as `locale` writes it, and for a locale that isn't in `LOCALES`.
    """
    if locale not in LOCALES:
        raise ValueError(f"locale is {locale!r}; expected one of {', '.join(LOCALES)}")
    if len(text) > MAX_CHARS:
        raise ValueError(f"{text[:MAX_CHARS]!r}... is too long for an amount: {len(text)} characters")
    match = _SHAPE.fullmatch(_SPACES.sub(" ", text.replace("\u2212", "-")).strip())
    if match is None:
        raise ValueError(f"{text!r} is not one amount, such as '1,234', '(12.5%)' or '$1.2 million'")
    if match["suffix"] == "m" and not (match["before"] or match["after"]):
        raise ValueError(f"{text!r} may be metres or millions: write 'M', 'million' or a currency")
    num_open, num_closed = (
        sum(match[name] is not None for name in names) for names in (("open", "inner_open"), ("close", "inner_close"))
    )
    if num_open != num_closed:
        raise ValueError(f"{text!r} has an unpaired parenthesis")
    signs = [part for part in (match["open"], match["inner_open"], match["sign"], match["inner_sign"]) if part]
    if len(signs) > 1:
        raise ValueError(f"{text!r} says more than once which sign it has")
    exponent = _EXPONENTS[match["suffix"].lower()] + int(match["exponent"] or 0)
    value = Decimal(f"{_digits(match['number'].strip(), locale, text)}e{exponent}")
    return value.copy_negate() if signs and signs[0] != "+" else value


def _digits(number: str, locale: str, text: str) -> str:
    """The number in Python's notation. Groups must have three digits, so that no decimal comma is read as one."""
    group, point = LOCALES[locale]
    grouped = rf"[0-9]{{1,3}}(?:{re.escape(group)}[0-9]{{3}})+"
    if not re.fullmatch(rf"(?:{grouped}|[0-9]+)(?:{re.escape(point)}[0-9]+)?", number):
        raise ValueError(f"{text!r} is not a number in the locale {locale!r}: groups {group!r}, decimals {point!r}")
    return number.replace(group, "").replace(point, ".")
