"""The filing domain: expected values recomputed from the printed filing, texts, and episodes in the real sandbox."""

import collections
import json
import re
from decimal import Decimal

import pytest

from envs.filing_fields import KINDS, FilingFieldsEnv, generate
from envs.filing_fields.env import problem_in
from envs.filing_fields.generate import SYSTEM
from envs.filing_fields.statements import LABELS, SIGNED, printed
from postrl.contracts import Task
from tests.envs.episodes import sandboxes, sh
from verifiers.amounts import read_amount
from verifiers.router import verify

LABEL_OF = {key: label for label, key in LABELS}
NOTE = re.compile(
    r"In (?P<y>\d{4}) \w+ had a net (?P<k>loss|income) of (?P<a>\S+)\."
    r"|\w+ reported a net (?P<k2>loss|income) of (?P<a2>\S+) for (?P<y2>\d{4})\."
)


def started(task: Task) -> FilingFieldsEnv:
    env = FilingFieldsEnv(sandboxes=sandboxes())
    env.reset(options={"task": task})
    return env


def example(kind: str = "plain") -> Task:
    return next(task for index in range(100) if (task := generate("train", 0, index)).kind == kind)


def hand_in(answer: str) -> str:
    return f"```json\n{answer}\n```"


# ----------------------------------------------------------------------------------------------- expected values


def asked(task: Task) -> tuple[str, list[str], str]:
    """The filing, the keys and the subject of a task, read from its prompt."""
    filing, _, request = task.prompt.rpartition("\n")
    subject, _, template = request.partition(": ")
    return filing, re.findall(r'"(\w+)": \?', template), subject


def recomputed(filing: str, key: str, subject: str) -> Decimal:
    """What a reader who only has the printed text makes of it."""
    if match := NOTE.fullmatch(filing):
        year, kind, amount = (match[name] or match[f"{name}2"] for name in "yka")
        assert (key, year) == ("net_income", subject)
        return -read_amount(amount) if kind == "loss" else read_amount(amount)
    header, *rows, currency = filing.split("\n")
    assert header.strip() == subject
    assert re.fullmatch(r"[A-Z]{3}", currency)
    (cell,) = (cell for label, cell in (re.split(r"  +", row) for row in rows) if label in (key, LABEL_OF.get(key)))
    return read_amount(cell)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_values_follow_from_the_printed_text(kind):
    tasks = [task for index in range(800) if (task := generate("train", 0, index)).kind == kind]
    assert len(tasks) == 100
    for task in tasks:
        filing, keys, year = asked(task)
        assert task.files == {"filing.txt": f"{filing}\n".encode()}
        assert keys == list(task.expected["fields"])
        for key in keys:
            assert recomputed(filing, key, year) == Decimal(task.expected["fields"][key]["value"]), task.prompt
            for other_year, value in task.expected["fields"][key]["other_years"].items():
                assert recomputed(filing, other_year, year) == Decimal(value), task.prompt
        for key, value in task.expected["others"].items():
            assert recomputed(filing, key, year) == Decimal(value), task.prompt


def test_kinds_are_what_they_say():
    by_kind = collections.defaultdict(list)
    for index in range(600):
        task = generate("train", 0, index)
        by_kind[task.kind].append(task)
    # A pair of kinds has opposite answers to the same question, so that none of them can be answered without reading.
    for kind, sign in [("plain", 1), ("negative", -1), ("profit", 1), ("loss", -1)]:
        for task in by_kind[kind]:
            (value,) = (Decimal(field["value"]) for field in task.expected["fields"].values())
            assert sign * value >= 1_000, task.prompt
        assert {key for task in by_kind[kind] for key in asked(task)[1]} <= SIGNED
    for kind, exponent in [("thousands", "e3"), ("millions", "e6")]:
        for task in by_kind[kind]:
            assert re.findall(r"e\d", task.reference[0]) == [exponent], task.prompt
            assert set(re.findall(r"\d([KM])", task.prompt)) == {"K", "M"}
    assert all(
        re.search(r"\n\w{3}\n", task.prompt) for task in by_kind["plain"] + by_kind["year"] + by_kind["two_fields"]
    )
    assert {len(task.expected["fields"]) for task in by_kind["two_fields"]} == {2}
    for task in by_kind["year"]:
        years = [line.split()[0] for line in task.prompt.split("\n")[1:4]]
        assert years == sorted(years, reverse=True)
        assert len(set(years)) == 3
    places = collections.Counter(
        [line.split()[0] for line in task.prompt.split("\n")[1:4]].index(*asked(task)[1]) for task in by_kind["year"]
    )
    assert min(places.values()) > 0.2 * places.total()


@pytest.mark.parametrize(
    ("amount", "text", "value"),
    [
        (printed(1234, 3, "K"), "1,234K", "1234000"),
        (printed(-12345, 6, "M"), "(12,345M)", "-12345000000"),
        (printed(5, 0), "5", "5"),
        (printed(-7, 0), "(7)", "-7"),
    ],
)
def test_amounts_are_printed_as_filings_do(amount, text, value):
    assert (amount.text, amount.value) == (text, Decimal(value))


# ------------------------------------------------------------------------------------------------------------ texts


def test_texts_fit_their_budgets():
    """48 and at most 60 tokens of SmolLM2's tokenizer, 30 for the longest answer; digits are a token each."""
    assert len(SYSTEM) <= 110
    for index in range(600):
        task = generate("train", 0, index)
        assert len(task.prompt) <= 260, task.prompt
        assert len(task.reference[0]) <= 75, task.reference


def test_references_copy_the_digits_and_say_the_scale_by_an_exponent():
    number = r"-?\d+(\.\d+)?(e3|e6)?"
    for index in range(300):
        task = generate("train", 0, index)
        body = task.reference[0].removeprefix("```json\n").removesuffix("\n```")
        assert re.fullmatch(rf'\{{"\w+": {number}(, "\w+": {number})?\}}', body)
        for mantissa in re.findall(r": -?([\d.]+)", body):
            assert mantissa in task.prompt.replace(",", "")


def test_plain_digits_are_as_right_as_an_exponent():
    task = example("millions")
    assert re.search(r"e\d", task.reference[0])
    answer = ", ".join(f'"{key}": {field["value"]}' for key, field in task.expected["fields"].items())
    *_, info = started(task).step(hand_in(f"{{{answer}}}"))
    assert verify(task, info["artifacts"], sandboxes()).success


def test_kinds_take_turns():
    assert [generate("heldout", 0, index).kind for index in range(8)] == list(KINDS)


def test_no_prompt_occurs_in_both_splits():
    train = {generate("train", 0, index).prompt for index in range(2_000)}
    heldout = {generate("heldout", 0, index).prompt for index in range(400)}
    assert not train & heldout


# --------------------------------------------------------------------------------------------------------- episodes


def test_references_of_many_tasks_succeed_in_one_turn():
    for index in range(35):
        task = generate("train", 7, index)
        observation, _, terminated, truncated, info = started(task).step(task.reference[0])
        assert (observation, terminated, truncated) == ("wrote answer.json", True, False)
        verdict = verify(task, info["artifacts"], sandboxes())
        assert verdict.success, (task.prompt, verdict.findings)


def test_broken_json_is_explained_and_can_be_repaired():
    task = example()
    env = started(task)
    observation, reward, terminated, truncated, _ = env.step(hand_in('{"cash": 1,234}'))
    assert observation == "Not JSON: Expecting property name enclosed in double quotes: line 1 column 12"
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, _, terminated, _, info = env.step(task.reference[0])
    assert terminated
    assert verify(task, info["artifacts"], sandboxes()).success


def test_the_first_object_ends_the_episode_right_or_wrong():
    task = example()
    (key,) = task.expected["fields"]
    _, _, terminated, truncated, info = started(task).step(hand_in(json.dumps({key: 1})))
    assert (terminated, truncated) == (True, False)
    assert verify(task, info["artifacts"], sandboxes()).reward == 0.0


def test_the_shell_shows_the_filing_and_its_answer_counts():
    task = example("two_fields")
    env = started(task)
    observation, *_ = env.step(sh("cat filing.txt"))
    assert observation == task.files["filing.txt"].decode().strip("\n")
    body = task.reference[0].split("\n")[1]
    _, _, terminated, truncated, info = env.step(sh(f"echo '{body}' > answer.json"))
    assert (terminated, truncated) == (False, True)
    assert verify(task, info["artifacts"], sandboxes()).success


def test_an_answer_that_can_not_be_written_is_explained():
    """The policy is in its own way; that is neither our fault nor the end of the episode."""
    task = example()
    env = started(task)
    env.step(sh("mkdir answer.json"))
    observation, _, terminated, truncated, info = env.step(task.reference[0])
    assert observation == "answer.json was not written: Is a directory"
    assert (terminated, truncated) == (False, True)
    assert verify(task, info["artifacts"], sandboxes()).reward == 0.0


def test_no_constant_hand_in_pays():
    task = example()
    for answer in ("{}", '{"": 0}', '{"answer": 0}', '{"filing": "filing.txt"}'):
        _, _, terminated, _, info = started(task).step(hand_in(answer))
        assert terminated
        assert verify(task, info["artifacts"], sandboxes()).reward == 0.0


def test_every_value_of_the_filing_under_the_asked_key_can_only_succeed_once():
    """A policy that can't choose can't hedge: a key twice is refused by the environment and by the verifier."""
    task = example("year")
    (key,) = task.expected["fields"]
    env = started(task)
    observation, _, terminated, *_ = env.step(hand_in(f'{{"{key}": 1, "{key}": 2}}'))
    assert (observation, terminated) == ("Not JSON: a key occurs twice", False)
    env.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", None),
        ('{"a": [1, {"b": null}]}', None),
        ('{"a": ' + "9" * 10_000 + "}", None),
        ("[]", 'Not a JSON object: write {"field": number}'),
        ("1", 'Not a JSON object: write {"field": number}'),
        ("{", "Not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ('{"a": NaN}', "Not JSON: NaN is no number"),
        ('{"a": -Infinity}', "Not JSON: -Infinity is no number"),
        ('{"a": 1, "a": 1}', "Not JSON: a key occurs twice"),
        ("[" * 16_000, "Not JSON: nested too deeply"),
    ],
)
def test_what_is_wrong_with_an_answer(text, problem):
    assert problem_in(text) == problem
