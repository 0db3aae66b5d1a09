"""The filing verifier: the rule for numbers, a finding for each mistake, strict JSON, hand-ins that are no answer."""

import dataclasses
import json
import re
import runpy
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers
from envs.sandbox import default_factory
from postrl.contracts import InfraError, Task, TaskError, Verdict
from verifiers.checking import Check
from verifiers.filing_fields import CHECK, compare, judge, verify

SANDBOXES = default_factory()
SCRIPT = runpy.run_path(str(Path(verifiers.__file__).parent / "checks" / "filing_fields.py"), run_name="check")

EXPECTED = {
    "fields": {
        "net_income": {"value": "-1234000", "other_years": {"2022": "567000"}},
        "tax_rate": {"value": "0.125", "other_years": {"2022": "0.2"}},
    },
    "others": {"cash": "88000"},
}
TASK = Task("filing_fields", "hand", "train", 0, 0, "S", "P", {"filing.txt": b"...\n"}, EXPECTED, ("",))


def judged(answer: str | bytes, **others: bytes) -> Verdict:
    data = answer.encode() if isinstance(answer, str) else answer
    planted = {f"work/{name.replace('_', '.')}": content for name, content in others.items()}
    return verify(TASK, {"work/answer.json": data, **planted}, SANDBOXES)


def read(answer: str) -> list[tuple[str, str, str]]:
    """What the script reads in `answer`: key, type, text."""
    return [(key, kind, text) for key, kind, text in SCRIPT["parse"](answer)]


def message(number: str, key: str = "net_income", kind: str = "a number") -> str | None:
    return compare(key, kind, number, EXPECTED)


def test_all_fields_right():
    parts = {"net_income": 1.0, "tax_rate": 1.0}
    verdict = judged('{"net_income": -1234000, "tax_rate": 0.125}')
    assert verdict == Verdict(1.0, True, parts, (), CHECK.version)
    assert re.fullmatch(r"filing_fields@[0-9a-f]{8}", verdict.verifier)


def test_the_reward_is_the_share_of_right_fields():
    verdict = judged('{"net_income": 1, "tax_rate": 0.125}')
    assert (verdict.reward, verdict.success) == (0.5, False)
    assert verdict.parts == {"net_income": 0.0, "tax_rate": 1.0}


def test_superfluous_fields_make_success_impossible():
    """All right and one extra: 2 of 3. So a policy can't print everything it sees."""
    verdict = judged('{"net_income": -1234000, "tax_rate": 0.125, "cash": 88000}')
    assert (verdict.reward, verdict.success) == (2 / 3, False)
    assert verdict.parts == {"net_income": 1.0, "tax_rate": 1.0, "not asked for 1": 0.0}
    assert [(f.subject, f.message) for f in verdict.findings] == [("cash", "was not asked for")]


def test_omitted_and_misspelt_fields_are_named():
    """Case B.31: which of many fields is missing must not hide behind one number."""
    verdict = judged('{"Net_income": -1234000, "tax_rate": 0.125}')
    assert verdict.reward == pytest.approx(1 / 3)
    assert [(f.subject, f.message) for f in verdict.findings] == [
        ("net_income", "is omitted"),
        ("Net_income", "was not asked for"),
    ]


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("number", ["-1234000", "-1234000.0", "-1234000.000", "-1.234e6", "-1.234E+06", "-1234e3"])
def test_equal_numbers_are_right_however_they_are_written(number):
    assert message(number) is None


@pytest.mark.parametrize(
    ("number", "finding"),
    [
        # B.18, B.24: a lost sign.
        ("1234000", "wrong sign: expected -1234000, got 1234000"),
        # B.20, B.30: the header's scale, not applied or applied twice.
        ("-1234", "off by 1000x: scale: expected -1234000, got -1234"),
        ("-1234000000", "off by 1000x: scale: expected -1234000, got -1234000000"),
        ("-1.234", "off by 1000000x: scale: expected -1234000, got -1.234"),
        ("1234", "off by 1000x: scale, wrong sign: expected -1234000, got 1234"),
        ("-12340000", "off by 10x: expected -1234000, got -12340000"),
        ("567000", "wrong year, that is 2022's: expected -1234000, got 567000"),
        ("567", "wrong year, that is 2022's, off by 1000x: scale: expected -1234000, got 567"),
        ("88000", "wrong row, that is cash: expected -1234000, got 88000"),
        ("0.125", "wrong row, that is tax_rate: expected -1234000, got 0.125"),
        ("-1243000", "digits swapped: expected -1234000, got -1243000"),
        ("-1234001", "expected -1234000, got -1234001"),
        ("-1233999.9999999999", "expected -1234000, got -1233999.9999999999"),
        ("0", "expected -1234000, got 0"),
        ("1e400", "expected -1234000, got 1e400"),
        ("-1e-9999999", "expected -1234000, got -1e-9999999"),
        ("1e99999999999999999999", "expected -1234000, got 1e99999999999999999999"),
    ],
)
def test_the_finding_names_the_mistake(number, finding):
    assert message(number) == finding


@pytest.mark.parametrize(
    ("number", "finding"),
    [
        # B.19, B.30: percent and basis points.
        ("12.5", "off by 100x: percent: expected 0.125, got 12.5"),
        ("1250", "off by 10000x: basis points: expected 0.125, got 1250"),
        ("-0.125", "wrong sign: expected 0.125, got -0.125"),
        ("0.2", "wrong year, that is 2022's: expected 0.125, got 0.2"),
        ("20", "wrong year, that is 2022's, off by 100x: percent: expected 0.125, got 20"),
        # B.22: rounding to two decimals.
        ("0.13", "expected 0.125, got 0.13"),
        ("0.12", "expected 0.125, got 0.12"),
        ("0.12500000000000001", "expected 0.125, got 0.12500000000000001"),
    ],
)
def test_ratios_are_exact_too(number, finding):
    assert message(number, "tax_rate") == finding


def test_small_ratios_are_not_rounded_together():
    """Case B.22: 0.001 was right for 0.004."""
    expected = {"fields": {"spread": {"value": "0.004", "other_years": {}}}, "others": {}}
    assert compare("spread", "a number", "0.001", expected) == "expected 0.004, got 0.001"
    assert compare("spread", "a number", "4e-3", expected) is None


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        ('"-1234000"', "is the string '-1234000' (as an amount -1234000), expected the JSON number -1234000"),
        ('"(1,234)"', "is the string '(1,234)' (as an amount -1234), expected the JSON number -1234000"),
        ('"n/a"', "is the string 'n/a', expected the JSON number -1234000"),
        ('"\\u0661"', "is the string '\\u0661', expected the JSON number -1234000"),
        ("null", "is null, expected the JSON number -1234000"),
        ("true", "is a boolean, expected the JSON number -1234000"),
        ("[-1234000]", "is a list, expected the JSON number -1234000"),
        ('{"value": -1234000}', "is an object, expected the JSON number -1234000"),
        ("1" * 41, "is a number of too many digits, expected the JSON number -1234000"),
        ("-1234000." + "0" * 60, "is a number of too many digits, expected the JSON number -1234000"),
    ],
)
def test_only_json_numbers_are_right(value, finding):
    """The documented rule: what isn't a JSON number is wrong, and the finding says so."""
    ((key, kind, text),) = read(f'{{"net_income": {value}}}')
    assert compare(key, kind, text, EXPECTED) == finding


@given(st.decimals(-(10**12), 10**12, allow_nan=False, places=4), st.sampled_from(["f", "e"]))
def test_a_number_is_right_exactly_when_it_is_equal(value, notation):
    expected = {"fields": {"x": {"value": "1234.5", "other_years": {}}}, "others": {}}
    text = f"{value:{notation}}"
    assert (compare("x", "a number", text, expected) is None) == (Decimal(text) == Decimal("1234.5"))


JSON_NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,10})(\.[0-9]{1,10})?([eE][+-]?[0-9]{1,12})?", fullmatch=True)


@given(JSON_NUMBERS)
def test_no_number_whatever_it_is_breaks_the_comparison(number):
    assert message(number) is None or message(number).endswith(f"got {number}")


# --------------------------------------------------------------------------------------------------- strict JSON


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("", "is not JSON: Expecting value in line 1, column 1"),
        ("net_income: 1", "is not JSON: Expecting value in line 1, column 1"),
        ("{'net_income': 1}", "is not JSON: Expecting property name enclosed in double quotes in line 1, column 2"),
        ('{"net_income": -1,234,000}', "is not JSON: Expecting property name enclosed in double quotes"),
        ('{"net_income": (1234)}', "is not JSON: Expecting value in line 1, column 16"),
        ('{"net_income": -1234000} {}', "is not JSON: Extra data in line 1, column 26"),
        ('{"net_income": -1234000,}', "is not JSON: "),
        ('{"net_income": NaN}', "is not JSON: NaN is no number"),
        ('{"net_income": Infinity}', "is not JSON: Infinity is no number"),
        ('{"net_income": -Infinity}', "is not JSON: -Infinity is no number"),
        ('{"net_income": 1, "net_income": -1234000}', "is ambiguous: a key occurs twice"),
        ('{"net_income": {"a": 1, "a": 2}}', "is ambiguous: a key occurs twice"),
        ("[-1234000, 0.125]", "holds a list, not an object"),
        ("-1234000", "holds a number, not an object"),
        ("null", "holds null, not an object"),
        ('"{}"', "holds a string, not an object"),
        ("[" * 4000, "is "),
        (json.dumps({str(i): 0 for i in range(33)}), "holds 33 fields, at most 32 are read"),
        ("\ufeff{}", "is not JSON: Unexpected UTF-8 BOM"),
        ('{"net_income": +1}', "is not JSON: Expecting value"),
        ('{"net_income": 01}', "is not JSON: "),
        ('{"net_income": 0x10}', "is not JSON: "),
        ('{"net_income": 1_000}', "is not JSON: "),
    ],
)
def test_what_is_not_one_strict_object_is_refused(answer, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        read(answer)


def test_numbers_stay_text_and_are_never_computed_with():
    assert read('{"a": 1e400, "b": 0.10, "c": -0}') == [
        ("a", "a number", "1e400"),
        ("b", "a number", "0.10"),
        ("c", "a number", "-0"),
    ]
    assert read('{"a": ' + "9" * 3000 + "}") == [("a", "a number of too many digits", "")]


@given(st.text(max_size=60) | st.text('{}[]":,-.0123456789eEnulltrue ', max_size=40))
def test_any_text_is_fields_or_a_value_error(answer):
    try:
        found = SCRIPT["parse"](answer)
    except ValueError:
        return
    report = judge(EXPECTED, [tuple(field) for field in found])
    assert report.parts.keys() >= {"net_income", "tax_rate"}


# ------------------------------------------------------------------------------------ in the real sandbox


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{}",
        "[]",
        "{",
        "null",
        "[" * 4000 + "]" * 4000,
        "[" * 100_000,
        b"\xff\xfe",
        "\0",
        '{"net_income": -1234000, "tax_rate": 0.125}' + " " * 4096,
        '{"net_income": 1' + "0" * 1_000_000 + "}",
        '{"net_income": "-1234000", "tax_rate": "0.125"}',
        '{"net_income": true, "tax_rate": true}',
        '{"reward": 1.0, "success": true}',
        '{"parts": {"net_income": 1.0}, "findings": [], "problem": null}',
        '{"problem": null, "fields": [["net_income", "a number", "-1234000"], ["tax_rate", "a number", "0.125"]]}',
        '{"fields": {"net_income": {"value": -1234000}, "tax_rate": {"value": 0.125}}}',
        '{"__class__": "Any", "__eq__": true, "\\ud800": 1}',
        "(1,234)",
        "import os; os._exit(0)",
    ],
    ids=range(20),
)
def test_hand_ins_without_a_right_field_earn_nothing_and_are_no_fault_of_ours(answer):
    verdict = judged(answer)
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert verdict.findings


def test_planted_files_decide_nothing():
    planted = {
        "json_py": b"raise SystemExit(0)\n",
        "decimal_py": b"raise SystemExit(0)\n",
        "reward_json": b'{"reward": 1.0}',
        "given_json": b"{}",
        "check_py": b"print(1)\n",
        "filing_txt": b"net_income 0\n",
    }
    assert judged("{}", **planted).reward == 0.0
    assert judged('{"net_income": -1234000, "tax_rate": 0.125}', **planted).success
    missing = verify(TASK, {"work/filing.txt": b"", "answer.json": b"{}"}, SANDBOXES)
    assert [(f.subject, f.message) for f in missing.findings] == [("answer.json", "is missing")]
    assert missing.parts == {"net_income": 0.0, "tax_rate": 0.0}


def test_a_script_that_breaks_is_a_fault_of_ours(monkeypatch):
    monkeypatch.setattr("verifiers.filing_fields.CHECK", Check(b"raise SystemExit(3)\n", "filing_fields@broken"))
    with pytest.raises(InfraError, match=r"filing_fields@broken: the check ended with exit 3; stderr: \(empty\)"):
        judged("{}")


@pytest.mark.parametrize("expected", [{}, {"fields": {}, "others": {}}])
def test_a_task_that_asks_nothing_is_a_defect_of_the_task(expected):
    with pytest.raises(TaskError, match="filing_fields/hand/train-0-0 can't be judged"):
        verify(dataclasses.replace(TASK, expected=expected), {"work/answer.json": b"{}"}, SANDBOXES)
