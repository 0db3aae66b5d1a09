"""When the engine breaks or closes, everybody who waits learns so, as an `InfraError`; who gives up, frees what it held."""

import threading

import numpy as np
import pytest

from postrl.contracts import InfraError
from postrl.rollout.engine import EngineConfig
from tests.policy.tiny import tiny_adapter, tiny_params
from tests.rollout.plain import TIMEOUT_S, Gate, small_engine, until

CONFIG = EngineConfig(max_requests=2, max_context=40, num_pages=6, max_step_tokens=4)


def zeros(params, adapter, cache, batch):
    """A step that samples token 0 everywhere, so that nothing is compiled."""
    num_rows = len(batch.row_R)
    return np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32), cache


def broken(*_):
    raise RuntimeError("device lost")


@pytest.fixture
def engine():
    with small_engine(config=CONFIG) as engine:
        engine._compute = zeros
        yield engine


def submit(engine, first, *, max_new_tokens=4, length=3):
    prompt = np.full(length, first, np.int32)
    return engine.submit(prompt, seed=0, temperature=1.0, max_new_tokens=max_new_tokens)


# -------------------------------------------------------------------------------------------------------- it breaks


def test_a_broken_step_reaches_running_and_waiting_requests_and_publications(engine):
    """Two requests run, a third waits for its turn, as does a publication; a fourth comes too late."""
    gate = Gate(engine, before_step=1)
    futures = [submit(engine, 1), submit(engine, 2), submit(engine, 3)]
    assert gate.reached.wait(TIMEOUT_S)
    errors = []

    def publish():
        try:
            engine.publish(tiny_params(), tiny_adapter(), version=1)
        except InfraError as error:
            errors.append(str(error))

    publishing = threading.Thread(target=publish)
    publishing.start()
    until(lambda: bool(engine._publications))
    gate.compute = broken
    gate.open.set()
    for future in futures:
        with pytest.raises(InfraError, match=r"the rollout engine failed: RuntimeError.*device lost"):
            future.result(TIMEOUT_S)
    publishing.join(TIMEOUT_S)
    assert len(errors) == 1
    assert "device lost" in errors[0]
    with pytest.raises(InfraError, match="device lost"):
        submit(engine, 4)
    with pytest.raises(InfraError, match="device lost"):
        engine.publish(tiny_params(), tiny_adapter(), version=1)


def test_a_failure_passes_over_who_gave_up(engine):
    gate = Gate(engine, before_step=0, compute=broken)
    futures = [submit(engine, first) for first in (1, 2, 3)]
    assert gate.reached.wait(TIMEOUT_S)
    assert futures[0].cancel()
    assert futures[2].cancel()
    gate.open.set()
    with pytest.raises(InfraError, match="device lost"):
        futures[1].result(TIMEOUT_S)


# -------------------------------------------------------------------------------------------------------- it closes


def test_closing_lets_running_requests_finish_and_fails_those_that_wait(engine):
    gate = Gate(engine, before_step=1)
    with engine._wake:  # all are there when the engine looks
        running, waiting = [submit(engine, 1), submit(engine, 2)], submit(engine, 3)
    assert gate.reached.wait(TIMEOUT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._closed)
    gate.open.set()
    for future in running:
        assert len(future.result(TIMEOUT_S).token_T) == 4
    with pytest.raises(InfraError, match="closed"):
        waiting.result(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    for call in (lambda: submit(engine, 4), lambda: engine.publish(tiny_params(), tiny_adapter(), version=1)):
        with pytest.raises(InfraError, match="closed"):
            call()


def test_closing_lets_those_who_gave_pages_back_finish_too():
    """Two requests of 22 tokens need two pages each, and there are three: the second begins again when the first is done."""
    config = EngineConfig(max_requests=2, max_context=40, num_pages=3, max_step_tokens=4)
    with small_engine(config=config) as engine:
        gate = Gate(engine, before_step=5, compute=zeros)
        with engine._wake:
            running = [submit(engine, first, max_new_tokens=20) for first in (1, 2)]
        assert gate.reached.wait(TIMEOUT_S)
        assert len(engine._running) == 2
        closing = threading.Thread(target=engine.close)
        closing.start()
        until(lambda: engine._closed)
        gate.open.set()
        for future in running:
            assert len(future.result(TIMEOUT_S).token_T) == 20


# ------------------------------------------------------------------------------------------------------- who gives up


def test_a_place_that_becomes_free_goes_to_who_waits(engine):
    gate = Gate(engine, before_step=4)
    with engine._wake:
        first, second, third = (
            submit(engine, 1, max_new_tokens=4),
            submit(engine, 2, max_new_tokens=9),
            submit(engine, 3),
        )
    assert gate.reached.wait(TIMEOUT_S)
    assert first.done()
    assert not second.done()
    assert (len(engine._running), len(engine._waiting)) == (2, 0)
    gate.open.set()
    assert (len(second.result(TIMEOUT_S).token_T), len(third.result(TIMEOUT_S).token_T)) == (9, 4)


def test_who_gives_up_while_it_runs_frees_its_pages_before_the_next_step(engine):
    """The other one is in its first page throughout; who gives up has 20 tokens in two."""
    gate = Gate(engine, before_step=2)
    other = submit(engine, 1, max_new_tokens=13)
    assert gate.reached.wait(TIMEOUT_S)
    assert engine._pool.num_available == 5
    given_up = submit(engine, 2, length=20, max_new_tokens=9)
    during = Gate(engine, before_step=5, compute=zeros)
    gate.open.set()
    assert during.reached.wait(TIMEOUT_S)
    assert engine._pool.num_available == 3
    assert given_up.cancel()
    after = Gate(engine, before_step=0, compute=zeros)
    during.open.set()
    assert after.reached.wait(TIMEOUT_S)
    assert (len(engine._running), engine._pool.num_available) == (1, 5)
    after.open.set()
    assert len(other.result(TIMEOUT_S).token_T) == 13
    assert engine._pool.num_available == 6
    assert engine.stats.num_sampled_tokens == 13  # three tokens a step: the prompt was not through


def test_who_gives_up_while_it_waits_is_never_computed(engine):
    gate = Gate(engine, before_step=1)
    with engine._wake:
        futures = [submit(engine, first) for first in (1, 2, 3, 4)]
    assert gate.reached.wait(TIMEOUT_S)
    assert futures[2].cancel()
    gate.open.set()
    for i in (0, 1, 3):
        assert len(futures[i].result(TIMEOUT_S).token_T) == 4
    assert (engine.stats.num_prompt_tokens, engine.stats.num_sampled_tokens) == (9, 12)
    assert engine._pool.num_available == 6


def test_giving_up_in_the_last_step_is_no_fault(engine):
    gate = Gate(engine, before_step=3)
    future = submit(engine, 1, max_new_tokens=4)
    assert gate.reached.wait(TIMEOUT_S)
    assert future.cancel()
    gate.open.set()
    assert len(submit(engine, 2).result(TIMEOUT_S).token_T) == 4
    assert engine._pool.num_available == 6
