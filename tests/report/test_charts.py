"""Charts by hand: ticks, means, positions."""

import re

import pytest

from postrl.report.charts import (
    Mark,
    Series,
    _spread,
    interval_chart,
    line_chart,
    nice_ticks,
    short,
    stacked_bars,
    trailing_mean,
)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1.0]),
        (0, 36, [0, 10, 20, 30, 40]),
        (0.3, 0.32, [0.3, 0.305, 0.31, 0.315, 0.32]),
        (-0.013, 0.021, [-0.02, -0.01, 0.0, 0.01, 0.02, 0.03]),
        (0, 0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_nice_ticks(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_trailing_mean():
    assert trailing_mean([1.0, 3.0, None, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert trailing_mean([None, 2.0], 3) == [None, 2.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04123, "0.0412"), (2e-5, "2e-05"), (312.4, "312"), (1312.0, "1,312"), (14100, "14.1k"), (1.2e6, "1.2M")],
)
def test_short(value, text):
    assert short(value) == text


def test_labels_move_apart_and_stay_inside():
    assert _spread([50.0, 50.0, 10.0], 13, 10, 100) == [50.0, 63.0, 10.0]
    assert _spread([98.0, 99.0], 13, 10, 100) == [87.0, 100.0]


def test_line_breaks_where_a_value_is_missing():
    chart = line_chart("Loss", [Series("loss", [0, 1, 2, 3], [1.0, None, 2.0, 3.0], "red")])
    assert chart is not None
    (path,) = re.findall(r'<path d="([^"]*)"', chart)
    assert re.sub(r"[\d. ]+", "", path) == "MML"
    assert "loss, step 1: not finite" in chart
    assert "loss, step 3: 3" in chart


def test_nothing_to_draw():
    assert line_chart("Loss", [Series("loss", [0, 1], [None, None], "red")]) is None
    assert stacked_bars("Seconds", [], {"rollout": []}) is None
    assert stacked_bars("Seconds", [1], {}) is None


def test_one_step_is_enough():
    assert "loss, step 5: 2" in str(line_chart("Loss", [Series("loss", [5], [2.0], "red")]))
    assert "rollout, step 5: 2.0 s" in str(stacked_bars("Seconds", [5], {"rollout": [2.0]}))


def test_bars_stack_to_the_total():
    chart = stacked_bars("Seconds", [0, 1], {"rollout": [6.0, 6.0], "update": [2.0, 2.0]}, height=234)
    assert chart is not None
    # Axis from 0 to 8 over 234 - 10 - 24 = 200 pixels: 6 s are 150 pixels, 2 s on top of them 50.
    bars = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', chart)
    assert bars == [("60.0", "150.0"), ("10.0", "50.0")] * 2


def test_intervals_stand_where_they_should():
    chart = interval_chart("Success", [("shell", [Mark("RL", 0.5, 0.25, 1.0, "blue")])], width=532)
    # 0 to 100 % spans 532 - 132 - 16 = 384 pixels from 132 on.
    assert 'x1="228.0" x2="516.0"' in chart
    assert 'cx="324.0"' in chart
    assert "shell, RL: 50\u00a0% (95\u00a0% interval 25\u00a0% to 100\u00a0%)" in chart
