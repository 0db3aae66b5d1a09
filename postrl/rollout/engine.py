"""The rollout engine: continuous batching over a paged cache, in steps of one shape.

Every step computes up to `max_step_tokens` tokens: one for each running request, then chunks of prompts. Requests begin when
there are pages for their prompt; what the cache already has of it is not computed again (postrl/rollout/pages.py). When pages
run out, the request that began last gives its own back and is computed again later. What a request samples depends on its
tokens and seed alone: randomness is keyed by (seed, position), and on CPUs the forward gives a token the same bits in any
company (postrl/policy/ops.py); elsewhere the audit measures the difference.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from postrl.contracts import Completion, InfraError, StopReason
from postrl.policy.attention import empty_cache
from postrl.policy.model import Adapter, ModelConfig, Params
from postrl.policy.ops import PAGE_SIZE
from postrl.rollout.pages import PagePool, Sequence
from postrl.rollout.step import Span, engine_step, step_batch


@dataclass(frozen=True)
class EngineConfig:
    max_requests: int = 72
    """Requests that run at once; others wait."""
    max_context: int = 384
    """Tokens of one request, prompt and completion together."""
    num_pages: int = 1152
    """Pages of 16 tokens for keys and values; of running requests and of what may serve again."""
    max_step_tokens: int = 128
    """Tokens that one step computes: of running requests one each, the rest of prompts."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ValueError(f"max_requests {self.max_requests} must be at least 1")
        if self.num_pages * PAGE_SIZE < self.max_context:
            raise ValueError(
                f"num_pages {self.num_pages} hold {self.num_pages * PAGE_SIZE} tokens, fewer than one request may have "
                f"(max_context {self.max_context})"
            )
        if self.max_step_tokens < self.max_requests:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} must be at least max_requests {self.max_requests}: a step "
                "computes one token for each running request"
            )


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started."""

    num_prompt_tokens: int = 0
    """Tokens of all prompts as requested."""
    num_prefilled_tokens: int = 0
    """Of these, computed; the others were found in the cache. What is computed again after a preemption is not counted."""
    num_sampled_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    """Time without a running request: the engine was starved by environments."""


@dataclass(eq=False)
class _Request:
    token_T: np.ndarray
    """The prompt, with room for the completion."""
    num_prompt: int
    seed: int
    temperature: float
    max_new_tokens: int
    future: Future[Completion]
    num_tokens: int
    """Of the prompt and what has been sampled."""
    num_cached: int = 0
    """Of these, in the pages of `sequence`."""
    has_begun: bool = False
    """And waits, if it waits, because it gave its pages back."""
    sequence: Sequence | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Engine:
    """Serves `submit` to any number of threads; one thread of its own owns the device. Use as a context manager."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        adapter: Adapter | None,
        adapter_scale: float,
        eos_id: int,
        config: EngineConfig,
    ) -> None:
        self.config = config
        self._eos_id = eos_id
        self._vocab_size = model.vocab_size
        self._policy: tuple[Params, Adapter | None] = (params, adapter)
        self._version = 0
        self._cache = empty_cache(model, config.num_pages)
        self._pool = PagePool(config.num_pages, PAGE_SIZE)
        self._compute = functools.partial(engine_step, model, adapter_scale)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        """In the order in which they began."""
        self._wake = threading.Condition()
        """Guards what waits and what was published; not held while a step is computed."""
        self._publications: deque[tuple[tuple[Params, Adapter | None], int, Future[None]]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self.stats = EngineStats()
        self._thread = threading.Thread(target=self._serve, name="rollout-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- for episodes

    def submit(self, token_T: np.ndarray, *, seed: int, temperature: float, max_new_tokens: int) -> Future[Completion]:
        """The completion of a prompt, in time; cancelling the future frees what it holds before the next step.

        ValueError for a prompt that leaves no room for a token or holds ids outside the vocabulary.
        """
        num_prompt, max_context = len(token_T), self.config.max_context
        if not 1 <= num_prompt < max_context:
            raise ValueError(f"prompt of {num_prompt} tokens; it must have at least 1 and fewer than {max_context}")
        if max_new_tokens < 1 or not 0 <= seed < 2**31 or not temperature >= 0:
            raise ValueError(
                f"max_new_tokens {max_new_tokens} must be at least 1, seed {seed} lie in [0, 2^31), and temperature "
                f"{temperature} not be negative"
            )
        if min(token_T) < 0 or max(token_T) >= self._vocab_size:
            raise ValueError(
                f"prompt holds ids from {min(token_T)} to {max(token_T)}; the vocabulary has {self._vocab_size}"
            )
        max_new_tokens = min(max_new_tokens, max_context - num_prompt)
        room_T = np.zeros(num_prompt + max_new_tokens, np.int32)
        room_T[:num_prompt] = token_T
        request = _Request(room_T, num_prompt, seed, temperature, max_new_tokens, Future(), num_tokens=num_prompt)
        with self._wake:
            self._check_alive()
            self._waiting.append(request)
            self._wake.notify()
        return request.future

    # -------------------------------------------------------------------------------------------- for the run

    def publish(self, params: Params, adapter: Adapter | None, version: int) -> str:
        """Takes over copies of the trained arrays between two steps; returns the digest of what the engine now holds.

        Running requests go on: their further tokens carry the new version, on keys that older ones left.
        """
        # Copies: the learner donates its own buffers to its next step.
        copied = jax.tree.map(jnp.copy, params if adapter is None else adapter)
        policy = (copied, None) if adapter is None else (params, copied)
        taken: Future[None] = Future()
        with self._wake:
            self._check_alive()
            self._publications.append((policy, version, taken))
            self._wake.notify()
        taken.result()
        return self.digest()

    def digest(self) -> str:
        """Of what is trained, as the engine holds it: of the adapter, else of the parameters."""
        params, adapter = self._policy
        return tree_digest(params if adapter is None else adapter)

    def close(self) -> None:
        """Running requests are finished first; those that wait fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- the one loop

    def _serve(self) -> None:
        """
        consumes: requests from `submit`, policies from `publish`
        waits for: one of them
        unblocked by: `submit`, `publish`, `close`
        produces: completions (each request's future)
        """
        try:
            while self._wait():
                start = time.perf_counter()
                self._step()
                self._count(busy_s=time.perf_counter() - start)
        except BaseException as error:  # noqa: BLE001 - the thread's last act: everybody who waits must learn of it
            with self._wake:
                self._failure = error
                failed = [r.future for r in (*self._running, *self._waiting)]
                failed += [taken for *_, taken in self._publications]
                self._waiting.clear()
            for future in failed:
                _fail(future, f"the rollout engine failed: {error!r}")

    def _wait(self) -> bool:
        """True once there is something to do; False when the engine is closed and nothing runs. Takes publications over."""
        start = time.perf_counter()
        with self._wake:
            idle = not self._running
            while not (self._running or self._waiting or self._publications or self._closed):
                self._wake.wait()
            while self._publications:
                self._policy, self._version, taken = self._publications.popleft()
                self._pool.clear()
                taken.set_result(None)
            refused = [r for r in self._waiting if self._closed and not r.has_begun]
            self._waiting = deque(r for r in self._waiting if r not in refused)
            closed = self._closed and not self._running and not self._waiting
        if idle:
            self._count(idle_s=time.perf_counter() - start)
        for request in refused:
            _fail(request.future, "the rollout engine is closed")
        return not closed

    def _step(self) -> None:
        """One step: chooses its tokens, computes them, and tells those who are done."""
        planned = self._plan()
        if not planned:
            return
        spans = [
            Span(
                r.token_T[r.num_cached : end],
                r.num_cached,
                _pages(r),
                end == r.num_tokens,
                r.seed,
                r.temperature,
            )
            for r, end in planned
        ]
        config = self.config
        batch = step_batch(
            spans,
            num_tokens=config.max_step_tokens,
            num_sequences=config.max_requests,
            num_pages=-(-config.max_context // PAGE_SIZE),
        )
        token_R, logprob_R, self._cache = self._compute(*self._policy, self._cache, batch)
        sampling = [r for (r, _), span in zip(planned, spans, strict=True) if span.sampled]
        for r, end in planned:
            r.num_cached = end
        # Counted before anybody learns that it has ended.
        self._count(num_sampled_tokens=len(sampling), num_steps=1)
        ended = []
        for r, token, logprob in zip(
            sampling, np.asarray(token_R).tolist(), np.asarray(logprob_R).tolist(), strict=False
        ):
            r.token_T[r.num_tokens] = token
            r.num_tokens += 1
            r.logprobs.append(logprob)
            r.versions.append(self._version)
            if token == self._eos_id or len(r.logprobs) == r.max_new_tokens:
                ended.append(r)
        for r in ended:
            self._release(r)
            self._running.remove(r)
        for r in ended:
            _finish(r, self._eos_id)

    def _plan(self) -> list[tuple[_Request, int]]:
        """Requests of this step, and up to which of its tokens each is computed. All have the pages for it."""
        for r in [r for r in self._running if r.future.cancelled()]:
            self._release(r)
            self._running.remove(r)
        planned: list[tuple[_Request, int]] = []
        left = self.config.max_step_tokens
        # Those that sample in this step first, so that no prompt, however long, holds them up.
        for r in sorted(self._running, key=lambda r: r.num_tokens - r.num_cached > 1):
            if r.sequence is None or left == 0:  # preempted for one before it
                continue
            end = min(r.num_tokens, r.num_cached + left)
            if not self._provide(r, end):
                continue
            planned.append((r, end))
            left -= end - r.num_cached
        # Pages are shared before they are computed: a step writes all keys and values before anybody reads them.
        for r, end in planned:
            self._share(r, end)
        while left > 0 and len(self._running) < self.config.max_requests and (r := self._admit()):
            end = min(r.num_tokens, r.num_cached + left)
            planned.append((r, end))
            left -= end - r.num_cached
            self._share(r, end)
        return planned

    def _provide(self, request: _Request, end: int) -> bool:
        """Pages for the request's tokens up to `end`, if need be those of whoever began last. False: it was its own turn.

        Whoever gives its pages back is not in the plan yet: prompts have all of theirs, others ask in the order they began.
        """
        assert request.sequence is not None
        while not self._pool.grow(request.sequence, end):
            last = self._running[-1]
            self._running.pop()
            self._release(last)
            self._count(num_preemptions=1)
            with self._wake:
                self._waiting.appendleft(last)
            if last is request:
                return False
        return True

    def _admit(self) -> _Request | None:
        """The next request that waits, with pages for its tokens. None: there is none, or there are too few pages."""
        with self._wake:
            while self._waiting and self._waiting[0].future.cancelled():
                self._waiting.popleft()
            if not self._waiting:
                return None
            request = self._waiting[0]
            sequence = self._pool.open(request.token_T[: request.num_tokens])
            num_cached = len(sequence.pages) * PAGE_SIZE
            if not self._pool.grow(sequence, request.num_tokens):
                self._pool.close(sequence)
                return None
            self._waiting.popleft()
        request.sequence, request.num_cached = sequence, num_cached
        self._running.append(request)
        if not request.has_begun:
            self._count(num_prompt_tokens=request.num_prompt, num_prefilled_tokens=request.num_prompt - num_cached)
        request.has_begun = True
        return request

    def _share(self, request: _Request, end: int) -> None:
        assert request.sequence is not None
        self._pool.share(request.sequence, request.token_T, end)

    def _release(self, request: _Request) -> None:
        if request.sequence is not None:
            self._pool.close(request.sequence)
        request.sequence, request.num_cached = None, 0

    def _count(self, **increments: float) -> None:
        old = self.stats
        self.stats = EngineStats(**{**vars(old), **{name: getattr(old, name) + n for name, n in increments.items()}})

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise InfraError(f"the rollout engine failed: {self._failure!r}")
        if self._closed:
            raise InfraError("the rollout engine is closed")


def _pages(request: _Request) -> list[int]:
    assert request.sequence is not None
    return request.sequence.pages


def _finish(request: _Request, eos_id: int) -> None:
    sampled_T = request.token_T[request.num_prompt : request.num_tokens].copy()
    completion = Completion(
        sampled_T,
        np.array(request.logprobs, np.float32),
        np.array(request.versions, np.int32),
        StopReason.STOP if sampled_T[-1] == eos_id else StopReason.LENGTH,
    )
    try:
        request.future.set_result(completion)
    except InvalidStateError:
        assert request.future.cancelled()


def _fail(future: Future[Any], message: str) -> None:
    try:
        future.set_exception(InfraError(message))
    except InvalidStateError:
        assert future.cancelled()


@dataclass(frozen=True)
class PolicySampler:
    """The engine as episodes see it (`postrl.contracts.Sampler`), with the settings of one phase."""

    engine: Engine
    temperature: float
    """0: greedy."""
    max_new_tokens: int

    def sample(self, token_T: np.ndarray, *, seed: int) -> Completion:
        future = self.engine.submit(
            token_T, seed=seed, temperature=self.temperature, max_new_tokens=self.max_new_tokens
        )
        return future.result()


def tree_digest(tree: Any) -> str:
    """SHA-256 over the paths, shapes and bytes of all leaves: equal exactly when two policies are the same bits."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
