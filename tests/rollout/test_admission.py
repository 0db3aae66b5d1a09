"""While others run, a request waits for company to start with, but never for long."""

import threading

import numpy as np
import pytest

from postrl.rollout.engine import EngineConfig
from tests.rollout.plain import small_engine

CONFIG = EngineConfig(
    num_slots=4,
    max_context=40,
    prefill_buckets=(2, 4),
    row_buckets=(8,),
    context_buckets=(40,),
    admission_size=2,
    admission_patience=3,
)
TIMEOUT_S = 60


@pytest.mark.parametrize(
    ("late", "expected_rows"),
    [
        ([2], [1, 1, 1, 1, 2]),  # alone: it is held back for three steps
        ([2, 3], [1, 3]),  # in company: at once
        ([2, 3, 4, 5], [1, 4]),  # the fifth has no slot
    ],
)
def test_company_or_patience(monkeypatch, late, expected_rows):
    decoding, go_on, rows = threading.Event(), threading.Event(), []

    def decode(num_tokens, params, adapter, cache, slot_B, *_):
        rows.append(int(np.sum(slot_B < CONFIG.num_slots)))
        decoding.set()
        assert go_on.wait(TIMEOUT_S)
        return np.zeros(len(slot_B), np.int32), np.zeros(len(slot_B), np.float32), cache

    def submit(session):
        prompt = np.array([session, 1, 2], np.int32)
        return engine.submit(prompt, seed=0, session=session, temperature=1.0, max_new_tokens=8)

    with small_engine(config=CONFIG) as engine:
        monkeypatch.setattr(engine, "_prefill", lambda num_tokens, params, adapter, cache, *_: cache)
        monkeypatch.setattr(engine, "_decode", decode)
        futures = [submit(1)]
        assert decoding.wait(TIMEOUT_S)
        futures += [submit(session) for session in late]
        go_on.set()
        for future in futures[:4]:
            assert len(future.result(TIMEOUT_S).token_T) == 8
        for session in (1, *late):
            engine.end(session)
        for future in futures[4:]:
            future.result(TIMEOUT_S)
    assert rows[: len(expected_rows)] == expected_rows
