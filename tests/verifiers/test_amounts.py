"""Reading amounts: what official scripts got wrong (shared cases B), locales that are declared, and what is refused."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.amounts import LOCALES, read_amount


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234", "1234"),
        ("1,234", "1234"),
        ("1,234,567.89", "1234567.89"),
        ("0", "0"),
        ("007", "7"),
        ("-1,234", "-1234"),
        ("+1,234", "1234"),
        ("\u22121,234", "-1234"),
        # B.18, B.24, B.25, A.8: parentheses are a minus.
        ("(1,234)", "-1234"),
        ("($1,234)", "-1234"),
        ("$(1,234)", "-1234"),
        ("(134)", "-134"),
        ("( 134 )", "-134"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        # B.19: and not only of whole numbers.
        ("(12.5%)", "-0.125"),
        ("(12.5)%", "-0.125"),
        # B.20, B.25: the scale counts.
        ("1.2bn", "1200000000"),
        ("$1.5M", "1500000"),
        ("$1.5", "1.5"),
        ("1.5 million", "1500000"),
        ("€1.2 Billion", "1200000000"),
        ("(£340 thousand)", "-340000"),
        ("12k", "12000"),
        ("$5m", "5000000"),
        ("2 trillion", "2000000000000"),
        ("USD 1.5 million", "1500000"),
        ("1,200 EUR", "1200"),
        # B.30: percent and basis points are fractions.
        ("12.5%", "0.125"),
        ("12.5 percent", "0.125"),
        ("45 bps", "0.0045"),
        ("250 basis points", "0.025"),
        ("0.5 %", "0.005"),
        # A.9
        ("1.234567e6", "1234567"),
        ("1.234567 million", "1234567"),
        ("1E3", "1000"),
        ("2e-2", "0.02"),
        # B.22: small ratios keep their digits.
        ("0.004", "0.004"),
        ("0.001", "0.001"),
    ],
)
def test_english_amounts(text, value):
    assert read_amount(text) == Decimal(value)


@pytest.mark.parametrize(
    ("locale", "text", "value"),
    [
        ("de", "1.234,56", "1234.56"),
        ("de", "1.234", "1234"),
        ("en", "1.234", "1.234"),
        ("de", "1,5", "1.5"),
        ("de", "(1.234.567,8)", "-1234567.8"),
        ("fr", "1 234,56", "1234.56"),
        ("fr", "1\u202f234 567", "1234567"),
        ("fr", "1\u00a0234,5 %", "12.345"),
        ("ch", "1'234.50", "1234.5"),
    ],
)
def test_the_declared_locale_decides(locale, text, value):
    assert read_amount(text, locale) == Decimal(value)


@pytest.mark.parametrize(
    ("locale", "text"),
    [
        ("en", "1.234,56"),
        ("de", "1,234.56"),
        ("en", "1,23"),
        ("en", "1,2345"),
        ("en", "12,34,567"),
        ("fr", "1,234,567"),
    ],
)
def test_another_locale_is_refused_and_never_guessed(locale, text):
    with pytest.raises(ValueError, match=f"not a number in the locale '{locale}'"):
        read_amount(text, locale)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "n/a",
        "-",
        "()",
        "1\u00a0234",
        "(5",
        "5)",
        "((5))",
        "--5",
        "-(5)",
        "(-5)",
        "5-",
        "5 cm",
        "5 m",
        "5m",
        "2 or 3",
        "2, 3",
        "n=2",
        "1.2 percentage points",
        "1.2 pp",
        "5 % million",
        "1.2.3",
        ".5",
        "5.",
        "1e999",
        "1_000",
        "0x10",
        "NaN",
        "Infinity",
        "\u0661\u0662",
        "$",
        "$$5",
        "9" * 61,
    ],
)
def test_what_is_not_exactly_one_amount_is_refused(text):
    with pytest.raises(ValueError, match=r"amount|parenthesis|which sign|metres|locale"):
        read_amount(text)


def test_an_unknown_locale_is_refused():
    with pytest.raises(ValueError, match="locale is 'xx'; expected one of en, de, fr, ch"):
        read_amount("1", "xx")


@given(st.text(max_size=70) | st.text("0123456789.,' ()%$kmMbne+-", max_size=30), st.sampled_from(list(LOCALES)))
def test_any_text_is_an_amount_or_a_value_error(text, locale):
    try:
        value = read_amount(text, locale)
    except ValueError:
        return
    assert value.is_finite()


@given(st.integers(-(10**30), 10**30), st.integers(0, 6), st.sampled_from(list(LOCALES)))
def test_what_is_printed_is_read_back_exactly(digits, num_decimals, locale):
    group, point = LOCALES[locale]
    whole, _, decimals = f"{abs(digits):0{num_decimals + 1}d}".partition(" ")
    if num_decimals:
        whole, decimals = whole[:-num_decimals], whole[-num_decimals:]
    text = f"{int(whole):,}".replace(",", group) + (point + decimals if decimals else "")
    printed = f"({text})" if digits < 0 else text
    assert read_amount(printed, locale) == Decimal(f"{digits}e-{num_decimals}")
