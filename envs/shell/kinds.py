"""The eight kinds of shell tasks. Each draws names and contents, and computes the right result in Python.

Every kind has two phrasings, other files that must not be touched, and results that neither doing nothing nor a
constant answer gives. References are the usual command in one style a kind, at most about 25 tokens, so that a few
demonstrations teach it; any command with the same result is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from envs.shell.words import CITIES, DIRECTORIES, EXTENSIONS, STEMS, WORDS

Rng = np.random.Generator


@dataclass(frozen=True)
class Problem:
    """A task before it has a place in a split. It asks for a stdout, or for changes of files, never for nothing."""

    prompt: str
    files: Mapping[str, str]
    command: str
    """The reference."""
    stdout: str | None = None
    """What the last command must print; None: whatever it likes."""
    number: bool = False
    """Whether `stdout` is one number, to be compared by value."""
    changes: Mapping[str, str | None] = field(default_factory=dict)
    """Files that must be there afterwards with new contents, or (None) be gone. All others must be as they were."""

    def __post_init__(self) -> None:
        real = all(self.files.get(path) != text for path, text in self.changes.items())
        if not real or (not self.changes and not (self.stdout or "").strip()):
            raise ValueError(f"{self.prompt!r} would be solved by doing nothing; it must ask for an output or a change")


def rename(rng: Rng) -> Problem:
    old, new, *others = _names(rng, 5)
    files = {name: _text(_lines(rng, 4)) for name in (old, *others)}
    prompt = _pick(
        rng,
        f"Rename {old} to {new}.",
        f"Give the file {old} the new name {new}.",
    )
    return Problem(prompt, files, f"mv {old} {new}", changes={old: None, new: files[old]})


def last_lines(rng: Rng) -> Problem:
    name, files, lines = _one_file(rng, _lines(rng, _between(rng, 12, 30)))
    n = _between(rng, 2, 9)
    prompt = _pick(
        rng,
        f"Show the last {n} lines of {name}.",
        f"Print the final {n} lines of {name}.",
    )
    return Problem(prompt, files, f"tail -n {n} {name}", stdout=_text(lines[-n:]))


def count_matches(rng: Rng) -> Problem:
    word, *rest = _sample(rng, WORDS, 24)
    num_matches = _between(rng, 5, 30)
    lines = _lines(rng, num_matches + _between(rng, 8, 20), rest)
    for row in rng.permutation(len(lines))[:num_matches]:
        words = lines[row].split()
        words[_between(rng, 0, len(words) - 1)] = word
        lines[row] = " ".join(words)
    name, files, _ = _one_file(rng, lines)
    prompt = _pick(
        rng,
        f"Count with grep how many lines of {name} contain {word}.",
        f"How many lines of {name} match {word}? Use grep -c.",
    )
    return Problem(prompt, files, f"grep -c {word} {name}", stdout=f"{num_matches}\n", number=True)


def sort_unique(rng: Rng) -> Problem:
    distinct = _sample(rng, WORDS, _between(rng, 5, 12))
    order = rng.permutation(np.arange(2 * len(distinct)) % len(distinct))
    name, files, _ = _one_file(rng, [distinct[i] for i in order])
    (out,) = _names(rng, 1, without=files)
    prompt = _pick(
        rng,
        f"Write the sorted unique lines of {name} to {out}, with sort -u and >.",
        f"Use sort -u to drop duplicate lines of {name}, and > to save them as {out}.",
    )
    return Problem(prompt, files, f"sort -u {name} > {out}", changes={out: _text(sorted(distinct))})


def cut_column(rng: Rng) -> Problem:
    rows = _table(rng, _between(rng, 6, 12))
    name, files, _ = _one_file(rng, [",".join(row) for row in rows], extension="csv")
    n = _between(rng, 1, 4)
    prompt = _pick(
        rng,
        f"Print column {n} of the comma separated file {name}.",
        f"Show only column {n} of {name} (comma separated).",
    )
    return Problem(prompt, files, f"cut -d, -f{n} {name}", stdout=_text([row[n - 1] for row in rows]))


def sum_column(rng: Rng) -> Problem:
    rows = _table(rng, _between(rng, 8, 16))
    name, files, _ = _one_file(rng, [",".join(row) for row in rows], extension="csv")
    n = _between(rng, 3, 4)
    prompt = _pick(
        rng,
        f"Add up column {n} of the comma separated file {name} with awk.",
        f"Use awk to sum column {n} in {name} (comma separated).",
    )
    total = sum(int(row[n - 1]) for row in rows)
    command = f"awk -F, '{{s+=${n}}} END {{print s}}' {name}"
    return Problem(prompt, files, command, stdout=f"{total}\n", number=True)


def count_files(rng: Rng) -> Problem:
    parent, *children = _sample(rng, DIRECTORIES, 3)
    directory, elsewhere = (f"{parent}/{child}" for child in children)
    num_wanted, num_outside = _between(rng, 5, 24), _between(rng, 2, 4)
    names = _names(rng, num_wanted + num_outside)
    paths = [f"{directory}/{name}" for name in names[:num_wanted]]
    paths += [f"{elsewhere}/{name}" for name in names[num_wanted:]]
    prompt = _pick(
        rng,
        f"Count the files in {directory} with ls | wc -l.",
        f"How many files does {directory} hold? Use ls | wc -l.",
    )
    command = f"ls {directory} | wc -l"
    return Problem(prompt, {path: f"{path}\n" for path in paths}, command, stdout=f"{num_wanted}\n", number=True)


def move_files(rng: Rng) -> Problem:
    (directory,) = _sample(rng, DIRECTORIES, 1)
    extension, other_extension = _sample(rng, EXTENSIONS, 2)
    stems = _sample(rng, STEMS, _between(rng, 4, 10))
    num_wanted = _between(rng, 2, len(stems) - 2)
    wanted = [f"{stem}.{extension}" for stem in stems[:num_wanted]]
    others = [f"{stem}.{other_extension}" for stem in stems[num_wanted:]]
    files = {name: _text(_lines(rng, 2)) for name in (*wanted, *others)}
    prompt = _pick(
        rng,
        f"Make a directory {directory} and move all .{extension} files into it.",
        f"Create the directory {directory} and put all .{extension} files there.",
    )
    changes: dict[str, str | None] = dict.fromkeys(wanted)
    changes |= {f"{directory}/{name}": files[name] for name in wanted}
    return Problem(prompt, files, f"mkdir {directory} && mv *.{extension} {directory}", changes=changes)


KINDS: Mapping[str, Callable[[Rng], Problem]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            rename,
            last_lines,
            count_matches,
            sort_unique,
            cut_column,
            sum_column,
            count_files,
            move_files,
        )
    }
)


def _between(rng: Rng, low: int, high: int) -> int:
    """Uniform, both ends included."""
    return int(rng.integers(low, high + 1))


def _pick(rng: Rng, *options: str) -> str:
    return options[int(rng.integers(len(options)))]


def _sample(rng: Rng, values: Sequence[str], num: int) -> list[str]:
    """`num` different ones."""
    return [values[int(i)] for i in rng.permutation(len(values))[:num]]


def _lines(rng: Rng, num: int, words: Sequence[str] = WORDS) -> list[str]:
    """Lines of three to five words."""
    lengths = rng.integers(3, 6, size=num)
    picks = rng.integers(len(words), size=(num, 5))
    return [" ".join(words[int(i)] for i in row[:length]) for row, length in zip(picks, lengths, strict=True)]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _names(rng: Rng, num: int, *, extension: str | None = None, without: Collection[str] = ()) -> list[str]:
    """`num` different file names, none of `without`."""
    names = [f"{stem}.{extension or _pick(rng, *EXTENSIONS)}" for stem in _sample(rng, STEMS, num + len(without))]
    return [name for name in names if name not in without][:num]


def _one_file(rng: Rng, lines: list[str], *, extension: str | None = None) -> tuple[str, dict[str, str], list[str]]:
    """A file with `lines` and two others of the same look: its name, all files, and the lines."""
    name, *others = _names(rng, 3, extension=extension)
    files = {other: _text([lines[i] for i in rng.integers(len(lines), size=5)]) for other in others}
    return name, {name: _text(lines), **files}, lines


def _table(rng: Rng, num_rows: int) -> list[list[str]]:
    """Rows of a city, a word, a number from 1 to 99 and one from 100 to 999."""
    places = rng.integers(len(CITIES), size=num_rows)
    words = rng.integers(len(WORDS), size=num_rows)
    small, large = rng.integers(1, 100, size=num_rows), rng.integers(100, 1000, size=num_rows)
    columns = zip(places, words, small, large, strict=True)
    return [[CITIES[place], WORDS[word], str(a), str(b)] for place, word, a, b in columns]
