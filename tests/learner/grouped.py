"""Groups of episodes for tests, and what a packed batch says about each loss token."""

from __future__ import annotations

import numpy as np

from postrl.learner.batch import Episode, TrainBatch


def make_episode(turns, *, first_id: int = 0, advantage: float = 1.0) -> Episode:
    """`turns`: (observation tokens, sampled tokens) each. Log-probabilities are -1, -2, ... from `first_id`, so that
    loss tokens can be told apart."""
    tokens, sampled = [], []
    for observation, completion in turns:
        tokens += [*observation, *completion]
        sampled += [False] * len(observation) + [True] * len(completion)
    sampled_T = np.array(sampled, bool)
    logprob_T = np.where(sampled_T, -(first_id + np.cumsum(sampled_T)), 0).astype(np.float32)
    return Episode(np.array(tokens, np.int32), sampled_T, logprob_T, advantage)


def random_group(
    rng, *, num_members: int, prompt_length: int, vocab_size: int = 64, first_id: int = 0
) -> list[Episode]:
    """Members of one or two turns behind one prompt, with log-probabilities around those of a near-uniform policy."""
    prompt = rng.integers(0, vocab_size, prompt_length)
    members = []
    for i in range(num_members):
        turns = [(prompt, rng.integers(0, vocab_size, rng.integers(1, 4)))]
        if i % 2 == 0:
            turns.append(
                (rng.integers(0, vocab_size, rng.integers(1, 3)), rng.integers(0, vocab_size, rng.integers(1, 4)))
            )
        plain = make_episode(turns, first_id=first_id, advantage=float(np.float32(rng.normal())))
        logprob_T = np.where(plain.sampled_T, rng.normal(-4.0, 0.7, len(plain.token_T)), 0).astype(np.float32)
        members.append(Episode(plain.token_T, plain.sampled_T, logprob_T, plain.advantage))
    return members


def loss_tokens_of(groups) -> list[tuple]:
    """(history, token, sampled log-probability, advantage) of every sampled token, sorted."""
    return sorted(
        (tuple(e.token_T[:t].tolist()), int(e.token_T[t]), float(e.logprob_T[t]), float(np.float32(e.advantage)))
        for group in groups
        for e in group
        for t in np.flatnonzero(e.sampled_T)
    )


def loss_tokens_in(batch: TrainBatch) -> list[tuple]:
    """The same, read out of a batch: the history is what the source sees, in the order of positions."""
    found = []
    rows = batch.rows
    for r in range(int(batch.num_rows)):
        for n in np.flatnonzero(rows.mask_N[r]):
            source = rows.source_N[r][n]
            segment, parent = rows.segment_T[r][source], rows.parent_T[r][source]
            assert segment > 0
            seen = [s for s in range(source + 1) if rows.segment_T[r][s] in (segment, parent)]
            positions = rows.position_T[r][seen]
            assert positions.tolist() == list(range(len(seen)))
            found.append(
                (
                    tuple(rows.token_T[r][seen].tolist()),
                    int(rows.target_N[r][n]),
                    float(rows.sampled_logprob_N[r][n]),
                    float(rows.advantage_N[r][n]),
                )
            )
    return sorted(found)
