"""The rollout engine: batched, cached sampling from the policy, each shape compiled once.

A cache of slots holds keys and values; a session (an episode) owns a slot from its first request to `end`. A prompt whose
beginning already lies in some slot is copied from there instead of computed: a group's prompt is prefilled once, and the
system message once a domain. Prefill covers all tokens but the last; the last enters the decode step, whose rows are
all running requests. A request's tokens depend on its own tokens and seed only, never on its neighbours: randomness is
keyed by (seed, position), and every shape contracts the same way (see postrl/policy/model.py), as far as XLA's choice of
kernels goes along. For the default base it does; for a model 64 wide it changes above 32 rows. The audit probes each run.

Shapes: B rows of a decode step, T tokens, S kv tokens, V vocab, Z slots.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from postrl.contracts import Completion, InfraError, StopReason
from postrl.policy.attention import SlotCache, cached_decode, cached_prefill, empty_cache
from postrl.policy.model import Adapter, ModelConfig, Params, forward, logits, unstacked
from postrl.rollout.sampling import heaviest, sample_inverse_cdf

PREFILL_BLOCK = 8
"""Neighbouring tokens of one prompt that are prefilled together. Fewer would waste less at a prompt's end, but a call of fewer
than 8 rows changes their bits (see `EngineConfig.row_buckets`)."""


@dataclass(frozen=True)
class EngineConfig:
    num_slots: int = 72
    """Sessions that can be open at once."""
    max_context: int = 384
    """Tokens of one session, prompt and completions together."""
    prefill_buckets: tuple[int, ...] = (4, 16)
    """Blocks of `PREFILL_BLOCK` tokens that one call prefills, of any prompts."""
    row_buckets: tuple[int, ...] = (8, 24, 48, 72)
    """Rows of a decode step; a step takes the smallest bucket that holds the running requests. At least 8: below that
    XLA:CPU picks other kernels and a row's bits depend on the number of rows."""
    context_buckets: tuple[int, ...] = (192, 288, 384)
    """How many cached tokens a step reads; the smallest that covers its longest row."""
    admission_size: int = 8
    """While others run, requests wait for company until there are so many: a prefill call costs nearly the same for one."""
    admission_patience: int = 6
    """Decode steps after which they start all the same."""

    def __post_init__(self) -> None:
        if self.row_buckets[-1] < self.num_slots or self.context_buckets[-1] < self.max_context:
            raise ValueError(
                f"the largest buckets {self.row_buckets[-1]} x {self.context_buckets[-1]} must cover "
                f"{self.num_slots} slots x {self.max_context} tokens"
            )
        if min(self.row_buckets) < 8:
            raise ValueError(f"row_buckets {self.row_buckets}: fewer than 8 rows change a row's bits on CPU")


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started."""

    num_prompt_tokens: int = 0
    """Tokens of all prompts as requested."""
    num_prefilled_tokens: int = 0
    """Of these, computed; the others were copied or already there."""
    num_sampled_tokens: int = 0
    num_decode_steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    """Time without a running request: the engine was starved by environments."""


@dataclass
class _Request:
    token_T: np.ndarray
    seed: int
    session: int
    temperature: float
    max_new_tokens: int
    future: Future[Completion]


@dataclass
class _Running:
    request: _Request
    slot: int
    next_token: int
    """Fed to the next decode step, at `position`."""
    position: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Policy(NamedTuple):
    """What a compiled step takes; see `Params.layers` for the two forms of layers, which both may have."""

    params: Params
    adapter: Any

    def trained_digest(self) -> str:
        """Of what is trained, whatever the form: of the adapter, else of the parameters."""
        if self.adapter is not None:
            return tree_digest(_stacked(self.adapter))
        return tree_digest(replace(self.params, layers=_stacked(self.params.layers)))


def _stacked(layers: Any) -> Any:
    return jax.tree.map(lambda *xs: np.stack(xs), *layers) if isinstance(layers, tuple) else layers


def _for_decoding(policy: _Policy, unstacked_params: Params | None) -> _Policy:
    """The policy as decoding takes it; `unstacked_params` are its parameters in that form, where they exist already.

    On CPU a scan copies each layer's weights out of their stack at every step, so decoding gets copies of its own, a layer at a
    time (223 -> 186 ms a step of 32 rows of the default base, without adapter, on a machine that ran something else as well).
    Prefill does more for each weight, and takes XLA eight times as long to compile like that: it keeps the stack.
    """
    if jax.default_backend() != "cpu":
        return policy
    if unstacked_params is None:
        unstacked_params = replace(policy.params, layers=unstacked(policy.params.layers))
    return _Policy(unstacked_params, None if policy.adapter is None else unstacked(policy.adapter))


class Engine:
    """Serves `sample` to any number of threads; one thread of its own owns the device. Use as a context manager."""

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
        self._prefilling = _Policy(params, adapter)
        self._decoding = _for_decoding(self._prefilling, None)
        self._version = 0
        # One slot more: padding rows of a step write there.
        self._cache = empty_cache(model, config.num_slots + 1, config.max_context + PREFILL_BLOCK)
        self._decode = functools.partial(_decode_step, model, adapter_scale)
        self._prefill = functools.partial(_prefill_step, model, adapter_scale)
        self._free = list(range(config.num_slots))
        self._slot_of: dict[int, int] = {}
        self._prefix: list[np.ndarray] = [np.zeros(0, np.int32)] * config.num_slots
        """Per slot: the tokens whose keys were computed by prefill. What decoding appended is not reused by others, so that
        a token's keys never depend on which slot happened to be free."""
        self._cached: list[np.ndarray] = [np.zeros(0, np.int32)] * config.num_slots
        """Per slot: the tokens of its session whose keys it holds."""
        self._waiting: deque[_Request] = deque()
        self._num_steps_held = 0
        """Decode steps since requests that could have started are held back for company."""
        self._wake = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self.stats = EngineStats()
        self._thread = threading.Thread(target=self._serve, name="rollout-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- for episodes

    def submit(
        self, token_T: np.ndarray, *, seed: int, session: int, temperature: float, max_new_tokens: int
    ) -> Future[Completion]:
        """ValueError for a prompt that leaves no room for a token or holds ids outside the vocabulary."""
        if not 2 <= len(token_T) < self.config.max_context:
            raise ValueError(
                f"prompt of {len(token_T)} tokens; it must have at least 2 and fewer than {self.config.max_context}"
            )
        if max_new_tokens < 1 or not 0 <= seed < 2**31:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1, and seed {seed} lie in [0, 2^31)")
        if min(token_T) < 0 or max(token_T) >= self._vocab_size:
            raise ValueError(
                f"prompt holds ids from {min(token_T)} to {max(token_T)}; the vocabulary has {self._vocab_size}"
            )
        room = self.config.max_context - len(token_T)
        request = _Request(
            np.asarray(token_T, np.int32), seed, session, temperature, min(max_new_tokens, room), Future()
        )
        with self._wake:
            self._check_alive()
            self._waiting.append(request)
            self._wake.notify()
        return request.future

    def end(self, session: int) -> None:
        with self._wake:
            slot = self._slot_of.pop(session, None)
            if slot is not None:
                self._free.append(slot)
                self._wake.notify()

    # -------------------------------------------------------------------------------------------- for the run

    def publish(self, params: Params, adapter: Adapter | None, version: int) -> str:
        """Takes over copies of the trained arrays; returns the digest of what the engine now holds.

        AssertionError while sessions are open: their cached keys belong to the old version.
        """
        with self._wake:
            assert not self._slot_of, f"publication with {len(self._slot_of)} open sessions"
            # Copies: the learner donates its own buffers to its next step.
            held = params if adapter is not None else jax.tree.map(jnp.copy, params)
            unstacked_params = self._decoding.params if held is self._prefilling.params else None
            self._prefilling = _Policy(held, jax.tree.map(jnp.copy, adapter))
            self._decoding = _for_decoding(self._prefilling, unstacked_params)
            self._version = version
            self._prefix = [np.zeros(0, np.int32)] * self.config.num_slots
            self._cached = [np.zeros(0, np.int32)] * self.config.num_slots
        digests = {policy.trained_digest() for policy in (self._prefilling, self._decoding)}
        return digests.pop() if len(digests) == 1 else f"prefill and decoding differ: {sorted(digests)}"

    def close(self) -> None:
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
        consumes: requests from `submit`, slots given back by `end`
        waits for: a request, or a free slot for one
        unblocked by: `submit`, `end`, `close`
        produces: completions (each request's future)
        """
        running: list[_Running] = []
        admitted: list[tuple[_Request, int]] | None = []
        try:
            while True:
                admitted = self._take(block=not running)
                if admitted is None:
                    return
                start = time.perf_counter()
                running = self._step(running + self._start(admitted))
                self._count(busy_s=time.perf_counter() - start)
        except BaseException as error:  # noqa: BLE001 - the thread's last act: everybody who waits must learn of it
            with self._wake:
                self._failure = error
                failed = [r.request for r in running] + [request for request, _ in admitted or ()] + list(self._waiting)
                self._waiting.clear()
            for request in failed:
                if not request.future.done():
                    request.future.set_exception(InfraError(f"the rollout engine failed: {error!r}"))

    def _take(self, block: bool) -> list[tuple[_Request, int]] | None:
        """Requests that have a slot, with it. None: closed."""
        start = time.perf_counter()
        with self._wake:
            while True:
                admitted, kept = [], deque()
                if not block and self._hold_back():
                    break
                for request in self._waiting:
                    if request.session not in self._slot_of and self._free:
                        self._slot_of[request.session] = self._pick_slot(request.token_T)
                    slot = self._slot_of.get(request.session)
                    if slot is None:
                        kept.append(request)
                    else:
                        admitted.append((request, slot))
                self._waiting = kept
                if admitted or not block:
                    break
                if self._closed:
                    for request in self._waiting:  # for a slot that no session will give back any more
                        request.future.set_exception(InfraError("the rollout engine is closed"))
                    self._waiting.clear()
                    return None
                self._wake.wait()
        if block:
            self._count(idle_s=time.perf_counter() - start)
        return admitted

    def _hold_back(self) -> bool:
        """Whether the requests that could start wait for more to start with."""
        num_open = sum(request.session in self._slot_of for request in self._waiting)
        num_ready = num_open + min(len(self._free), len(self._waiting) - num_open)
        config = self.config
        held = 0 < num_ready < config.admission_size and self._num_steps_held < config.admission_patience
        self._num_steps_held = self._num_steps_held + 1 if held else 0
        return held

    def _pick_slot(self, token_T: np.ndarray) -> int:
        """The free slot that already holds most of the prompt; among equals the one unused for longest."""
        slot = max(self._free, key=lambda z: _common(self._prefix[z], token_T))
        self._free.remove(slot)
        self._cached[slot] = np.zeros(0, np.int32)
        return slot

    def _start(self, admitted: list[tuple[_Request, int]]) -> list[_Running]:
        """Brings all tokens but the last of each request into its slot; what requests share is computed once."""
        started, rest = [], admitted
        while rest:
            now, later = [], []
            computing: set[int] = set()
            """Slots of this round, which hold their prompt only at its end: what shares more with one waits and copies it."""
            for request, slot in rest:
                source, position = self._best_prefix(request, slot, computing)
                if source in computing:
                    later.append((request, slot))
                    continue
                if source != slot:
                    self._cache = _copy_slot(self._cache, jnp.int32(source), jnp.int32(slot))
                if len(self._cached[slot]) == 0:  # the session's first request
                    self._prefix[slot] = request.token_T[:-1]
                    computing.add(slot)
                now.append(_Running(request, slot, next_token=int(request.token_T[-1]), position=position))
            self._prefill_all(now)
            started, rest = started + now, later
        return started

    def _best_prefix(self, request: _Request, slot: int, computing: set[int]) -> tuple[int, int]:
        """The slot that holds most of the request's tokens but the last, and how many.

        Among equals one that holds them already, then the request's own.
        """
        needed_T, own_T = request.token_T[:-1], self._cached[slot]
        assert np.array_equal(needed_T[: len(own_T)], own_T), (
            f"session {request.session} changed its history: a rewritten context is a new session"
        )
        if len(own_T) > 0:  # not the session's first request
            return slot, len(own_T)
        common = [_common(prefix_T, needed_T) for prefix_T in self._prefix]
        source = max(range(self.config.num_slots), key=lambda z: (common[z], z not in computing, z == slot))
        return source, common[source]

    def _prefill_all(self, started: list[_Running]) -> None:
        """Computes what each slot lacks; afterwards all requests are at their last token."""
        size, most = PREFILL_BLOCK, self.config.prefill_buckets[-1]
        blocks: list[tuple[int, int, np.ndarray]] = []
        """Slot, first position, at most `size` tokens."""
        for r in started:
            token_T = r.request.token_T
            self._count(num_prompt_tokens=len(token_T), num_prefilled_tokens=len(token_T) - 1 - r.position)
            blocks += [(r.slot, t, token_T[t:-1][:size]) for t in range(r.position, len(token_T) - 1, size)]
            r.position = len(token_T) - 1
        for first in range(0, len(blocks), most):
            part = blocks[first : first + most]
            num_rows = next(b for b in self.config.prefill_buckets if b >= len(part))
            slot_B = np.full(num_rows, self.config.num_slots, np.int32)
            start_B, token_BT = np.zeros(num_rows, np.int32), np.zeros((num_rows, size), np.int32)
            for i, (slot, start, token_T) in enumerate(part):
                slot_B[i], start_B[i], token_BT[i, : len(token_T)] = slot, start, token_T
            num_tokens = self._context_bucket(max(start + len(token_T) for _, start, token_T in part))
            self._cache = self._prefill(num_tokens, *self._prefilling, self._cache, slot_B, token_BT, start_B)

    def _step(self, running: list[_Running]) -> list[_Running]:
        """One token for every running request; returns those that go on."""
        num_rows = next(b for b in self.config.row_buckets if b >= len(running))
        num_tokens = self._context_bucket(max(r.position for r in running) + 1)
        slot_B = np.full(num_rows, self.config.num_slots, np.int32)
        token_B, position_B, seed_B = (np.zeros(num_rows, np.int32) for _ in range(3))
        temperature_B = np.ones(num_rows, np.float32)
        for i, r in enumerate(running):
            slot_B[i], token_B[i], position_B[i] = r.slot, r.next_token, r.position
            seed_B[i], temperature_B[i] = r.request.seed, r.request.temperature
        sampled_B, logprob_B, self._cache = self._decode(
            num_tokens, *self._decoding, self._cache, slot_B, token_B, position_B, seed_B, temperature_B
        )
        sampled_B, logprob_B = np.asarray(sampled_B), np.asarray(logprob_B)
        self._count(num_sampled_tokens=len(running), num_decode_steps=1)  # before anybody learns that it has ended
        going = []
        for i, r in enumerate(running):
            r.tokens.append(int(sampled_B[i]))
            r.logprobs.append(float(logprob_B[i]))
            r.next_token, r.position = r.tokens[-1], r.position + 1
            ended = r.next_token == self._eos_id
            if ended or len(r.tokens) >= r.request.max_new_tokens:
                self._cached[r.slot] = np.concatenate([r.request.token_T, np.array(r.tokens[:-1], np.int32)])
                r.request.future.set_result(
                    Completion(
                        np.array(r.tokens, np.int32),
                        np.array(r.logprobs, np.float32),
                        np.full(len(r.tokens), self._version, np.int32),
                        StopReason.STOP if ended else StopReason.LENGTH,
                    )
                )
            else:
                going.append(r)
        return going

    def _context_bucket(self, num_tokens: int) -> int:
        # The cache itself is no longer than `max_context` and a chunk, however large the last bucket.
        return min(next(b for b in self.config.context_buckets if b >= num_tokens), self.config.max_context)

    def _count(self, **increments: float) -> None:
        old = self.stats
        self.stats = EngineStats(**{**vars(old), **{name: getattr(old, name) + n for name, n in increments.items()}})

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise InfraError(f"the rollout engine failed: {self._failure!r}")
        if self._closed:
            raise InfraError("the rollout engine is closed")


@dataclass(frozen=True)
class PolicySampler:
    """The engine as episodes see it (`postrl.contracts.Sampler`), with the settings of one phase."""

    engine: Engine
    temperature: float
    """0: greedy."""
    max_new_tokens: int

    def sample(self, token_T: np.ndarray, *, seed: int, session: int) -> Completion:
        future = self.engine.submit(
            token_T, seed=seed, session=session, temperature=self.temperature, max_new_tokens=self.max_new_tokens
        )
        return future.result()

    def end(self, session: int) -> None:
        self.engine.end(session)


def tree_digest(tree: Any) -> str:
    """SHA-256 over the paths, shapes and bytes of all leaves: equal exactly when two policies are the same bits."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _common(prefix_T: np.ndarray, token_T: np.ndarray) -> int:
    n = min(len(prefix_T), len(token_T))
    differs = np.flatnonzero(prefix_T[:n] != token_T[:n])
    return int(differs[0]) if len(differs) else n


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5,))
def _decode_step(
    model: ModelConfig,
    adapter_scale: float,
    num_tokens: int,
    params: Params,
    adapter: Any,
    cache: SlotCache,
    slot_B: jax.Array,
    token_B: jax.Array,
    position_B: jax.Array,
    seed_B: jax.Array,
    temperature_B: jax.Array,
) -> tuple[jax.Array, jax.Array, SlotCache]:
    """Sampled tokens, their log-probabilities under the sampled distribution, and the cache."""
    attend = cached_decode(slot_B, position_B, num_tokens)
    h_B1D, cache = forward(model, params, adapter, adapter_scale, token_B[:, None], position_B[:, None], attend, cache)
    greedy_B = temperature_B == 0
    logits_BV = logits(params, h_B1D[:, 0]) / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    uniform_B = jax.vmap(lambda seed, t: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), t)))(
        seed_B, position_B
    )
    sampled_B = jnp.where(greedy_B, heaviest(logits_BV), sample_inverse_cdf(logits_BV, uniform_B))
    logprob_B = jnp.take_along_axis(logits_BV, sampled_B[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits_BV, axis=-1)
    return sampled_B.astype(jnp.int32), logprob_B, cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5,))
def _prefill_step(
    model: ModelConfig,
    adapter_scale: float,
    num_tokens: int,
    params: Params,
    adapter: Any,
    cache: SlotCache,
    slot_B: jax.Array,
    token_BT: jax.Array,
    start_B: jax.Array,
) -> SlotCache:
    position_BT = start_B[:, None] + jnp.arange(token_BT.shape[1])
    attend = cached_prefill(slot_B, start_B, num_tokens)
    return forward(model, params, adapter, adapter_scale, token_BT, position_BT, attend, cache)[1]


@functools.partial(jax.jit, donate_argnums=(0,))
def _copy_slot(cache: SlotCache, source: jax.Array, target: jax.Array) -> SlotCache:
    return jax.tree.map(lambda x: x.at[:, target].set(x[:, source]), cache)
