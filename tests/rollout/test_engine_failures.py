"""When the engine breaks or closes, everybody who waits for it learns so, as an `InfraError`."""

import threading

import numpy as np
import pytest

from postrl.contracts import InfraError
from postrl.rollout.engine import EngineConfig
from tests.rollout.plain import small_engine

CONFIG = EngineConfig(num_slots=2, max_context=40, prefill_buckets=(2, 4), row_buckets=(8,), context_buckets=(40,))
TIMEOUT_S = 60


@pytest.fixture
def engine(monkeypatch):
    """An engine whose programs do nothing, so that nothing is compiled; tests replace them."""
    with small_engine(config=CONFIG) as engine:
        monkeypatch.setattr(engine, "_prefill", lambda num_tokens, params, adapter, cache, *_: cache)
        yield engine


def submit(engine, session):
    prompt = np.array([session, 1, 2], np.int32)
    return engine.submit(prompt, seed=0, session=session, temperature=1.0, max_new_tokens=4)


def broken(*_):
    raise RuntimeError("device lost")


def test_a_broken_decode_reaches_running_and_waiting_requests(engine, monkeypatch):
    """Two requests run, a third waits for a slot, a fourth comes too late."""
    decoding, go_on = threading.Event(), threading.Event()

    def decode(*_):
        decoding.set()
        assert go_on.wait(TIMEOUT_S)
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "_decode", decode)
    futures = [submit(engine, 1)]
    assert decoding.wait(TIMEOUT_S)
    futures += [submit(engine, 2), submit(engine, 3)]
    go_on.set()
    for future in futures:
        with pytest.raises(InfraError, match=r"the rollout engine failed: RuntimeError.*device lost"):
            future.result(TIMEOUT_S)
    with pytest.raises(InfraError, match="device lost"):
        submit(engine, 4)


def test_a_broken_prefill_reaches_the_requests_it_was_for(engine, monkeypatch):
    """Both were taken out of the queue, neither runs yet."""
    with engine._wake:  # both are there when the engine looks
        monkeypatch.setattr(engine, "_prefill", broken)
        futures = [submit(engine, 1), submit(engine, 2)]
    for future in futures:
        with pytest.raises(InfraError, match="device lost"):
            future.result(TIMEOUT_S)


def test_closing_reaches_who_waits_for_a_slot(engine, monkeypatch):
    """Two sessions stay open, so a third request waits; closing must not leave it waiting for ever."""

    def decode(num_tokens, params, adapter, cache, slot_B, *_):
        return np.zeros(len(slot_B), np.int32), np.zeros(len(slot_B), np.float32), cache

    monkeypatch.setattr(engine, "_decode", decode)
    for future in (submit(engine, 1), submit(engine, 2)):
        assert len(future.result(TIMEOUT_S).token_T) == 4
    waiting = submit(engine, 3)
    engine.close()
    with pytest.raises(InfraError, match="closed"):
        waiting.result(TIMEOUT_S)
    with pytest.raises(InfraError, match="closed"):
        submit(engine, 4)


def test_closing_lets_running_requests_finish(engine, monkeypatch):
    decoding, go_on = threading.Event(), threading.Event()

    def decode(num_tokens, params, adapter, cache, slot_B, *_):
        decoding.set()
        assert go_on.wait(TIMEOUT_S)
        return np.zeros(len(slot_B), np.int32), np.zeros(len(slot_B), np.float32), cache

    monkeypatch.setattr(engine, "_decode", decode)
    future = submit(engine, 1)
    assert decoding.wait(TIMEOUT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    go_on.set()
    assert len(future.result(TIMEOUT_S).token_T) == 4
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_freed_slot_goes_to_who_waits(engine, monkeypatch):
    def decode(num_tokens, params, adapter, cache, slot_B, *_):
        return np.zeros(len(slot_B), np.int32), np.zeros(len(slot_B), np.float32), cache

    monkeypatch.setattr(engine, "_decode", decode)
    first, second, third = (submit(engine, session) for session in (1, 2, 3))
    first.result(TIMEOUT_S)
    second.result(TIMEOUT_S)
    assert not third.done()
    engine.end(1)
    assert len(third.result(TIMEOUT_S).token_T) == 4
