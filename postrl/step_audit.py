"""The invariants that every step of reinforcement learning checks on itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

from postrl.learner.group_batch import StepData
from postrl.policy import ops
from postrl.run_state import Run

MAX_LOGPROB_GAP = 1e-4
"""Of log-probabilities, where the forward is not exact: in nats at the first step; later, where rarer tokens are sampled,
relative below -1. Sampler and learner are one forward in float32; what remains is the order of sums (measured on a CPU
without kernels, in nats: 2e-5 to 8e-5 a step, and once 1.1e-4)."""


def audit_step(run: Run, step: int, data: StepData, metrics: Mapping[str, float]) -> None:
    """Raises `postrl.audit.AuditFailure` with a plain sentence when the step shows that the run learns from nonsense."""
    check, rl = run.audit.check, run.config.rl
    num_episodes = data.num_episodes
    fault_rate = data.metrics["faults"] / num_episodes
    check(
        "faults within bound",
        fault_rate <= run.config.rollout.max_fault_rate,
        f"{data.metrics['faults']:.0f} of {num_episodes} episodes ended in a fault of ours; they are excluded, not scored 0."
        if fault_rate <= run.config.rollout.max_fault_rate
        else f"{fault_rate:.0%} of the step's episodes ended in a fault of ours: {data.fault_messages[:3]}. "
        "Mend the sandbox or verifier that they name, then start the same command again.",
        step=step,
        rate=fault_rate,
    )
    run.num_steps_without_signal = 0 if data.batch is not None else run.num_steps_without_signal + 1
    check(
        "rewards are not constant",
        run.num_steps_without_signal < rl.max_steps_without_signal,
        f"{data.num_informative_groups} groups of the step had different rewards."
        if run.num_steps_without_signal < rl.max_steps_without_signal
        else f"In the last {run.num_steps_without_signal} steps every group got one reward for all its episodes, so nothing is "
        f"learned (mean reward {data.metrics.get('reward.mean', math.nan):.2f}). All 0: give more or easier demonstrations; "
        "all 1: the tasks are solved; otherwise look at the verifier.",
        step=step,
        num_informative_groups=data.num_informative_groups,
    )
    staleness = (step + 1) - data.oldest_version
    check(
        "staleness within bound",
        0 <= staleness <= rl.max_off_policy_steps,
        f"All trained tokens were sampled by version {step + 1}."
        if 0 <= staleness <= rl.max_off_policy_steps
        else f"A trained token was sampled by version {data.oldest_version}, {staleness} versions from {step + 1}; "
        f"allowed are {rl.max_off_policy_steps}.",
        step=step,
        oldest_version=data.oldest_version,
    )
    if data.batch is None:
        return
    gap, of = (
        (metrics["logprob_gap.max"], "nats") if step == 0 else (metrics["logprob_gap.relative.max"], "of their size")
    )
    bound = 0.0 if ops.is_exact() else MAX_LOGPROB_GAP
    check(
        "sampler and learner agree",
        gap <= bound,
        f"Log-probabilities of sampled tokens, recomputed by the learner, differ by {gap:.1e} {of} at most."
        if gap <= bound
        else f"Log-probabilities of sampled tokens, recomputed by the learner, differ by up to {gap:.1e} {of} (bound "
        f"{bound:.0e}): sampler and learner are not the same policy, and every ratio is wrong.",
        step=step,
        max_gap=gap,
    )
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    moves = finite and metrics["grad_norm"] > 0 and metrics["update_norm"] > 0
    check(
        "the update changes the policy",
        moves,
        f"Gradient norm {metrics['grad_norm']:.2e}, update norm {metrics['update_norm']:.2e}."
        if moves
        else f"Loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, update norm {metrics['update_norm']}: "
        + ("not finite; lower the learning rate." if not finite else "nothing is trained; is the adapter connected?"),
        step=step,
    )
