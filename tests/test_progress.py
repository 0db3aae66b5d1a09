"""The display as text, on a clock that the test moves; never on the wall's."""

import io
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from postrl.progress import Progress, clock_text, field_text, sparkline


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def plain(clock, **options):
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    return Progress("quickstart", console=console, clock=clock, **options), console.file


def text_of(progress):
    console = Console(file=io.StringIO(), width=90)
    console.print(progress.render())
    return console.file.getvalue()


def test_panel_shows_everything(clock):
    progress, _ = plain(clock)
    progress.phase("rl", total=36)
    clock.now_s += 60
    progress.domain("shell", 0.5)
    progress.domain("shell", 0.62)
    progress.domain("code_repair", 0.0)
    progress.update(12, reward=0.4123, tokens_per_s=1312.4, faults=3)
    text = text_of(progress)
    for part in ("quickstart", "rl", "step 12/36", "ETA 2:00", "reward 0.412", "1,312 tokens/s", "3 faults", "1:00"):
        assert part in text
    assert "62 %" in text
    assert "▅▅" in text  # 0.5 -> block 4 of 0..7, 0.62 -> block 4
    assert "waiting" not in text


def test_wait_is_named_after_two_seconds(clock):
    progress, _ = plain(clock)
    with progress.waiting("64 episodes"):
        clock.now_s += 2.0
        assert progress.waiting_for is None
        clock.now_s += 0.5
        with progress.waiting("a checkpoint"):
            assert progress.waiting_for == "64 episodes (2 s)"
            assert "waiting for 64 episodes (2 s)" in text_of(progress)
    assert progress.waiting_for is None


def test_eta_counts_this_run_only(clock):
    progress, _ = plain(clock)
    progress.phase("rl", total=36, done=30)
    assert progress.remaining_s is None
    clock.now_s += 20
    progress.update(32)
    assert progress.remaining_s == pytest.approx(40.0)


def test_plain_lines_are_periodic_and_whole(clock):
    progress, out = plain(clock)
    with progress:
        progress.phase("rl", total=3)
        progress.domain("filing_fields", 0.25)
        progress.update(1, reward=0.25, tokens_per_s=300, faults=0)
        clock.now_s += 11
        progress.update(2, reward=0.5)
        progress.update(3, reward=0.75)
        progress.say("[bold]not markup[/bold]")
    assert out.getvalue().splitlines() == [
        "[0:00] rl 0/3",
        "[0:11] rl 2/3 · filing_fields 25 % · reward 0.500 · 300 tokens/s · 0 faults · ETA 0:06",
        "[0:11] rl 3/3 · filing_fields 25 % · reward 0.750 · 300 tokens/s · 0 faults · ETA 0:00",
        "[bold]not markup[/bold]",
    ]


def test_plain_waits_are_said_once_then_every_thirty_seconds(clock):
    progress, out = plain(clock)
    with progress.waiting("the first compilation"):
        for _ in range(70):
            clock.now_s += 1
            progress.say_due_waits()
    assert out.getvalue().splitlines() == [
        f"[{clock_text(s)}] waiting for the first compilation ({s} s)" for s in (3, 33, 63)
    ]


def test_terminal_gets_a_panel(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with Progress("toy", console=console, clock=clock) as progress:
        progress.phase("rl", total=2)
        progress.update(2, reward=1.0)
        progress.say("stopped: the reward is constant")
    text = console.file.getvalue()
    assert "╭─ toy" in text
    assert "stopped: the reward is constant" in text
    assert "[0:00]" not in text


def test_many_threads(clock):
    progress, out = plain(clock)

    def work(index):
        with progress.waiting(f"episode {index}"):
            progress.domain(f"domain{index % 3}", index / 100)
            progress.update(index, reward=index / 100)
            progress.render()

    with progress, ThreadPoolExecutor(8) as pool:
        progress.phase("rl", total=1000)
        list(pool.map(work, range(1, 100)))
    assert progress.waiting_for is None
    assert out.getvalue().startswith("[0:00] rl 0/1000")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (245.4, "4:05"), (3845, "1:04:05")])
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reward", 0.4123, "reward 0.412"),
        ("lr", 2e-5, "lr 2.00e-05"),
        ("faults", 1204, "1,204 faults"),
        ("rollout_s", 9.71, "rollout 9.7 s"),
        ("tokens_per_s", 312.4, "312 tokens/s"),
        ("stage", "scoring", "stage scoring"),
    ],
)
def test_field_text(name, value, text):
    assert field_text(name, value) == text


def test_sparkline():
    assert sparkline(deque([0.0, 0.5, 1.0])) == "▁▅█"
