"""The live display of a run: phase, step, reward, success per domain, speed, faults, time left, and what it waits for.

    with Progress("quickstart") as progress:
        progress.phase("rl", total=36)
        for step in range(36):
            with progress.waiting("64 episodes"):
                ...
            progress.domain("shell", success=0.62)
            progress.update(step + 1, reward=0.41, tokens_per_s=312, faults=0)

On a terminal it is one panel, redrawn in place; elsewhere (CI, nohup) a plain line every ten seconds and one whenever a
wait takes longer than two. All methods may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHOW_WAIT_AFTER_S = 2.0
REPEAT_WAIT_EVERY_S = 30.0
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 16


class Progress:
    """See the module's text. `clock` gives seconds; tests pass their own."""

    def __init__(
        self,
        title: str,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = 10.0,
    ):
        self._title = title
        self._console = console or Console()
        self._clock = clock
        self._line_every_s = line_every_s
        self._mutex = threading.RLock()
        self._began = self._phase_began = clock()
        self._phase, self._total, self._step, self._first_step = "starting", 0, 0, 0
        self._fields: dict[str, float | str] = {}
        self._domains: dict[str, deque[float]] = {}
        self._waits: dict[int, tuple[str, float]] = {}
        self._said_waits: dict[int, float] = {}
        self._wait_numbers = itertools.count()
        self._last_line = -float("inf")
        self._live: Live | None = None
        self._closing = threading.Event()
        self._lines: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Twice a second: drawing takes a few milliseconds of a machine that has better things to do.
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            self._lines = threading.Thread(target=self._say_waits, name="progress-waits", daemon=True)
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._lines.join()

    # ------------------------------------------------------------------------------------------------ what a run says

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begins a phase of `total` steps, of which a resumed run has `done` behind it."""
        with self._mutex:
            self._phase, self._total, self._step, self._first_step = name, total, done, done
            self._phase_began = self._clock()
            self._fields.clear()
            self._domains.clear()
        self._line(force=True)

    def update(self, step: int, **fields: float | str) -> None:
        """`step` steps of the phase are done. `fields`: figures to show, such as reward, tokens_per_s, faults, loss."""
        with self._mutex:
            self._step = step
            self._fields.update(fields)
        self._line(force=step == self._total)

    def domain(self, name: str, success: float) -> None:
        """The latest success rate (0 to 1) of a domain."""
        with self._mutex:
            self._domains.setdefault(name, deque(maxlen=_NUM_SPARKS)).append(success)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Names what the block waits for; shown once that has lasted longer than two seconds."""
        number = next(self._wait_numbers)
        with self._mutex:
            self._waits[number] = (what, self._clock())
        try:
            yield
        finally:
            with self._mutex:
                del self._waits[number]
                self._said_waits.pop(number, None)

    def say(self, text: str) -> None:
        """Prints one line, above the panel if there is one."""
        self._console.print(Text(text), soft_wrap=True)

    def finish(self, *shown: RenderableType) -> None:
        """Ends the live panel and prints what a person reads last."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for renderable in shown:
            self._console.print(renderable, soft_wrap=isinstance(renderable, str))

    @property
    def waiting_for(self) -> str | None:
        """The longest of the waits that have lasted longer than two seconds: "64 episodes (12 s)"."""
        with self._mutex:
            if not self._waits:
                return None
            what, since = min(self._waits.values(), key=lambda wait: wait[1])
            waited_s = self._clock() - since
        return f"{what} ({waited_s:.0f} s)" if waited_s > SHOW_WAIT_AFTER_S else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds left in this phase at the pace so far; None before its first step."""
        with self._mutex:
            num_done = self._step - self._first_step
            if num_done <= 0 or self._total <= 0:
                return None
            return (self._clock() - self._phase_began) / num_done * (self._total - self._step)

    # ------------------------------------------------------------------------------------------------ the panel

    def render(self) -> RenderableType:
        """The panel as it is now."""
        with self._mutex:
            head = Table.grid(padding=(0, 2))
            head.add_row(
                Text(self._phase, style="bold"),
                Text(f"step {self._step}/{self._total}"),
                ProgressBar(max(self._total, 1), self._step, width=28, complete_style="cyan"),
                Text("" if self.remaining_s is None else f"ETA {clock_text(self.remaining_s)}", style="cyan"),
            )
            parts: list[RenderableType] = [head]
            if self._fields:
                figures = Text()
                for name, value in self._fields.items():
                    alarming = name == "faults" and value != 0
                    figures.append(field_text(name, value) + "   ", style="red" if alarming else "")
                parts.append(figures)
            if self._domains:
                parts += [Text(), self._domain_table()]
            if (waiting := self.waiting_for) is not None:
                parts.append(Text(f"waiting for {waiting}", style="yellow"))
            elapsed = clock_text(self._clock() - self._began)
            return Panel(
                Group(*parts), title=Text(self._title), title_align="left", subtitle=elapsed, subtitle_align="right"
            )

    def _domain_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, history in self._domains.items():
            table.add_row(
                Text(name, style="dim"),
                Text(f"{100 * history[-1]:.0f} %", justify="right"),
                ProgressBar(1.0, history[-1], width=20, complete_style="cyan"),
                Text(sparkline(history), style="cyan"),
            )
        return table

    # ------------------------------------------------------------------------------------------------ plain lines

    def line(self) -> str:
        """The state in one line of text."""
        with self._mutex:
            parts = [f"{self._phase} {self._step}/{self._total}"]
            parts += [f"{name} {100 * history[-1]:.0f} %" for name, history in self._domains.items()]
            parts += [field_text(name, value) for name, value in self._fields.items()]
            if self.remaining_s is not None:
                parts.append(f"ETA {clock_text(self.remaining_s)}")
            return f"[{clock_text(self._clock() - self._began)}] " + " · ".join(parts)

    def _line(self, *, force: bool) -> None:
        if self._live is not None:
            return
        with self._mutex:
            now = self._clock()
            if not force and now - self._last_line < self._line_every_s:
                return
            self._last_line = now
            self.say(self.line())

    def _say_waits(self) -> None:
        """Prints plain lines about waits.

        Consumes: the waits that other threads have begun and not ended. Waits for: half a second, or the end of the
        display. Unblocked by: `__exit__`. Produces: one line once a wait has lasted two seconds, then every thirty.
        """
        while not self._closing.wait(0.5):
            self.say_due_waits()

    def say_due_waits(self) -> None:
        """One round of the loop above."""
        with self._mutex:
            now = self._clock()
            for number, (what, since) in self._waits.items():
                last = self._said_waits.get(number)
                if now - since > SHOW_WAIT_AFTER_S and (last is None or now - last >= REPEAT_WAIT_EVERY_S):
                    self._said_waits[number] = now
                    self.say(f"[{clock_text(now - self._began)}] waiting for {what} ({now - since:.0f} s)")


# -------------------------------------------------------------------------------------------------------- formats


def clock_text(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def field_text(name: str, value: float | str) -> str:
    """`reward 0.412`, `312 tokens/s`, `1,204 faults`, `rollout 9.7 s`."""
    if isinstance(value, str):
        return f"{name} {value}"
    if name.endswith("_per_s"):
        return f"{value:,.0f} {name.removesuffix('_per_s')}/s"
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {value:.1f} s"
    if isinstance(value, int):
        return f"{value:,} {name}"
    return f"{name} {value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{name} {value:.2e}"


def sparkline(values: deque[float]) -> str:
    """Rates from 0 to 1 as a row of blocks."""
    return "".join(_SPARKS[min(int(max(value, 0.0) * len(_SPARKS)), len(_SPARKS) - 1)] for value in values)
