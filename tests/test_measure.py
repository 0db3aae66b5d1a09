"""What the measuring scripts share: alternation, ratios by round, goals, JSON and exit status, worked out by hand."""

import json
import math
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def measure(monkeypatch):
    """`scripts/measure.py`, found as a script beside it finds it."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import measure

    return measure


def test_sides_alternate_and_the_warm_up_does_not_count(measure):
    calls, said = [], []

    def side(name):
        def run(k):
            calls.append((name, k))
            return {"decode": 10.0 * k + (name == "b")}

        return run

    samples = measure.alternate({"a": side("a"), "b": side("b")}, num_rounds=2, num_warmup=1, say=said.append)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert samples == {"a": {"decode": [10.0, 20.0]}, "b": {"decode": [11.0, 21.0]}}
    assert said[0] == "warm-up  a: decode 0.00 s"
    assert said[-1] == "round 2/2  b: decode 21.00 s"


def test_no_round_is_refused(measure):
    with pytest.raises(ValueError, match="num_rounds is 0"):
        measure.alternate({}, num_rounds=0)
    with pytest.raises(ValueError, match="at least one"):
        measure.spread([])


def test_speedup_is_formed_within_a_round(measure):
    # A machine half as fast in the second round changes both sides, and no ratio.
    assert measure.speedup([1.0, 2.0, 1.0], [3.0, 6.0, 3.0]) == measure.Spread(3.0, 3.0, 3.0)
    assert measure.speedup([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == measure.Spread(1.0, 0.5, 2.0)
    with pytest.raises(ValueError, match="zip"):
        measure.speedup([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [
        (1.7, 1.7, False, True),
        (1.69, 1.7, False, False),
        (1.7, 1.7, True, True),
        (1.71, 1.7, True, False),
        (math.nan, 1.7, False, False),
        (math.nan, 1.7, True, False),
        (5.0, None, False, None),
    ],
)
def test_goals(measure, value, goal, at_most, met):
    assert measure.Row("n", value, "x", "how", goal, at_most).met is met


def test_finish_writes_rows_and_is_strict_only_when_asked(measure, tmp_path, capsys):
    rows = [measure.Row("speed-up", 1.5, "x", "by hand", 1.7), measure.Row("rate", 3.0, "tokens/s", "by hand")]
    path = tmp_path / "new" / "rows.json"
    assert measure.finish("Title", rows, measure.Options(json=path)) == 0
    assert json.loads(path.read_text()) == [
        {"name": "speed-up", "value": 1.5, "unit": "x", "goal": 1.7, "met": False, "how": "by hand"},
        {"name": "rate", "value": 3.0, "unit": "tokens/s", "goal": None, "met": None, "how": "by hand"},
    ]
    assert "MISSED" in capsys.readouterr().out
    assert measure.finish("Title", rows, measure.Options(strict=True)) == 1
    assert measure.finish("Title", rows[1:], measure.Options(strict=True)) == 0


def test_more_cpus_than_there_are_is_refused(measure):
    with pytest.raises(ValueError, match="num_threads is 100000"):
        measure.use_cpus(100_000)
