"""What the learner consumes, and how episodes become it. Pure numpy.

A group shares its prompt: a row holds the prompt once, as a segment, and behind it a segment for each episode whose
`parent` is the prompt. An episode's tokens see the prompt and themselves. With 8 episodes of 25 tokens behind a prompt of
100, 300 tokens are computed instead of 1,000, and the gradient is exactly that of separate sequences.

A loss token is the place in the row whose activations predict it, the token, and what was known when it was sampled. The
first tokens of all completions of a group are predicted from the same place, the prompt's last token.

Shapes: R rows, T tokens of a row, N loss tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

from postrl.contracts import Trajectory


@struct.dataclass
class Row:
    """Leading dim R in a `TrainBatch`; none inside the step's loop over rows."""

    token_T: Any  # int32 [T]
    position_T: Any  # int32 [T]: place in the episode's own sequence
    segment_T: Any  # int32 [T]: 0 is padding
    parent_T: Any  # int32 [T]: the segment seen besides the own one; -1: none
    source_N: Any  # int32 [N]: index into T of the predicting token
    target_N: Any  # int32 [N]
    mask_N: Any  # bool [N]
    sampled_logprob_N: Any  # float32 [N]
    advantage_N: Any  # float32 [N]


@struct.dataclass
class TrainBatch:
    rows: Row
    num_rows: Any  # int32 []: rows beyond are padding and are not computed
    num_loss_tokens: Any  # int32 []: over all rows; the denominator of the loss


@dataclass(frozen=True)
class Episode:
    """An episode as the learner needs it."""

    token_T: np.ndarray
    """int32 [T]: prompts and completions of all turns."""
    sampled_T: np.ndarray
    """bool [T]: sampled by the policy, so a loss token."""
    logprob_T: np.ndarray
    """float32 [T]: under the sampling policy; 0 where nothing was sampled."""
    advantage: float


def episode(trajectory: Trajectory, advantage: float) -> Episode:
    tokens, sampled, logprobs = [], [], []
    for turn in trajectory.turns:
        tokens += [turn.prompt_T, turn.completion.token_T]
        sampled += [np.zeros(len(turn.prompt_T), bool), np.ones(len(turn.completion.token_T), bool)]
        logprobs += [np.zeros(len(turn.prompt_T), np.float32), turn.completion.logprob_T]
    return Episode(np.concatenate(tokens), np.concatenate(sampled), np.concatenate(logprobs), advantage)


def shared_length(group: Sequence[Episode]) -> int:
    """Leading tokens that all members share and none of them sampled."""
    length = min(int(np.argmax(member.sampled_T)) for member in group)
    assert length > 0, "an episode begins with tokens that the policy did not sample: something must predict its first"
    first_T = group[0].token_T[:length]
    for member in group[1:]:
        differs = np.flatnonzero(member.token_T[:length] != first_T[:length])
        length = int(differs[0]) if len(differs) else length
    return length


@dataclass(frozen=True)
class RowShape:
    """The shape of a row; each is compiled once."""

    num_tokens: int
    num_targets: int


def pack(
    groups: Sequence[Sequence[Episode]],
    shapes: Sequence[RowShape],
    max_rows: int,
    num_loss_tokens: int | None = None,
) -> TrainBatch:
    """Packs groups into rows of the one shape that wastes the least.

    Episodes of a group stay together as far as a row holds them; where they don't fit, the prompt is repeated in the next
    row. Groups share rows first-fit by size. `num_loss_tokens` is the loss's denominator where it counts tokens that were
    left out because their advantage is 0; by default the tokens in the rows.

    Raises:
      ValueError: an episode fits no shape, or more than `max_rows` rows are needed.
    """
    candidates = []
    for shape in shapes:
        rows = _assign(groups, shape)
        if rows is not None and len(rows) <= max_rows:
            candidates.append((len(rows) * shape.num_tokens, shape.num_tokens, shape, rows))
    if not candidates:
        longest = max(len(e.token_T) for group in groups for e in group)
        raise ValueError(
            f"{sum(map(len, groups))} episodes (the longest of {longest} tokens) fit none of the row shapes "
            f"{list(shapes)} in at most {max_rows} rows; raise learner.row_shapes or learner.max_rows"
        )
    _, _, shape, rows = min(candidates, key=lambda c: c[:2])
    built = [_build_row(row, shape) for row in rows]
    built += [_build_row([], shape)] * (max_rows - len(built))
    stacked = Row(*(np.stack([getattr(row, f) for row in built]) for f in Row.__dataclass_fields__))
    return TrainBatch(
        stacked, np.int32(len(rows)), np.int32(stacked.mask_N.sum() if num_loss_tokens is None else num_loss_tokens)
    )


@dataclass(frozen=True)
class _Part:
    """Episodes that share one prompt segment, and what they take up in a row."""

    prompt_length: int
    members: list[Episode]
    num_tokens: int
    num_targets: int


def empty_batch(shape: RowShape, max_rows: int) -> TrainBatch:
    """A batch of padding, to compile a step with."""
    row = _build_row([], shape)
    rows = Row(*(np.stack([getattr(row, f)] * max_rows) for f in Row.__dataclass_fields__))
    return TrainBatch(rows, np.int32(0), np.int32(0))


def _assign(groups: Sequence[Sequence[Episode]], shape: RowShape) -> list[list[_Part]] | None:
    """Rows of parts; None when some episode is too long for the shape."""
    parts: list[_Part] = []
    for group in groups:
        prompt_length = shared_length(group)
        members: list[Episode] = []
        tokens, targets = prompt_length, 0
        for member in group:
            tail, loss_tokens = len(member.token_T) - prompt_length, int(member.sampled_T.sum())
            if len(member.token_T) > shape.num_tokens or loss_tokens > shape.num_targets:
                return None
            if members and (tokens + tail > shape.num_tokens or targets + loss_tokens > shape.num_targets):
                parts.append(_Part(prompt_length, members, tokens, targets))
                members, tokens, targets = [], prompt_length, 0
            members.append(member)
            tokens, targets = tokens + tail, targets + loss_tokens
        parts.append(_Part(prompt_length, members, tokens, targets))
    rows: list[list[_Part]] = []
    room: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda p: -p.num_tokens):
        needed = (part.num_tokens, part.num_targets)
        i = next((i for i, free in enumerate(room) if needed[0] <= free[0] and needed[1] <= free[1]), len(rows))
        if i == len(rows):
            rows.append([])
            room.append((shape.num_tokens, shape.num_targets))
        rows[i].append(part)
        room[i] = (room[i][0] - needed[0], room[i][1] - needed[1])
    return rows


def _build_row(parts: Iterable[_Part], shape: RowShape) -> Row:
    T, N = shape.num_tokens, shape.num_targets
    row = Row(
        token_T=np.zeros(T, np.int32),
        position_T=np.zeros(T, np.int32),
        segment_T=np.zeros(T, np.int32),
        parent_T=np.full(T, -1, np.int32),
        source_N=np.zeros(N, np.int32),
        target_N=np.zeros(N, np.int32),
        mask_N=np.zeros(N, bool),
        sampled_logprob_N=np.zeros(N, np.float32),
        advantage_N=np.zeros(N, np.float32),
    )
    t = n = segment = 0
    for part in parts:
        prompt_length = part.prompt_length
        segment += 1
        prompt_segment, prompt_start = segment, t
        prompt = slice(t, t + prompt_length)
        row.token_T[prompt] = part.members[0].token_T[:prompt_length]
        row.position_T[prompt] = np.arange(prompt_length)
        row.segment_T[prompt] = segment
        t += prompt_length
        for member in part.members:
            segment += 1
            tail_length = len(member.token_T) - prompt_length
            tail = slice(t, t + tail_length)
            row.token_T[tail] = member.token_T[prompt_length:]
            row.position_T[tail] = np.arange(prompt_length, len(member.token_T))
            row.segment_T[tail] = segment
            row.parent_T[tail] = prompt_segment
            # Where in the row each token of the episode lies.
            place_T = np.concatenate(
                [np.arange(prompt_start, prompt_start + prompt_length), np.arange(t, t + tail_length)]
            )
            targets = np.flatnonzero(member.sampled_T)
            loss = slice(n, n + len(targets))
            row.source_N[loss] = place_T[targets - 1]
            row.target_N[loss] = member.token_T[targets]
            row.mask_N[loss] = True
            row.sampled_logprob_N[loss] = member.logprob_T[targets]
            row.advantage_N[loss] = member.advantage
            t, n = t + tail_length, n + len(targets)
    return row
