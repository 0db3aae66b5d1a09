"""Plays the episodes of a step on a pool of threads, judges them, and records how each ended, exactly once.

Episodes block (Gymnasium is synchronous, tools block), so each has a thread; the engine batches what they ask for. What the
journal already holds is not played again, so that a killed run resumes where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from postrl.contracts import (
    Domain,
    InfraFault,
    PolicyError,
    PolicyFault,
    Sampler,
    SandboxFactory,
    Scored,
    Task,
    TaskDefect,
    TaskError,
    Verifier,
)
from postrl.policy.chat import ChatFormat
from postrl.rollout.episode import run_episode
from postrl.scheduler.groups import Episode, EpisodeKey, Group, RecordedEpisode
from postrl.scheduler.journal import Journal, JournalMismatch


@dataclass(frozen=True)
class Collector:
    """Everything that playing an episode needs besides the policy."""

    domains: Mapping[str, Domain]
    sandboxes: SandboxFactory
    verify: Verifier
    chat: ChatFormat
    journal: Journal
    num_workers: int
    max_context: int
    max_attempts: int
    max_turns: int

    def collect(
        self,
        groups: Sequence[Group],
        sampler_for: Callable[[Task], Sampler],
        on_ended: Callable[[RecordedEpisode], None] = lambda _: None,
    ) -> list[RecordedEpisode]:
        """
        The ended episodes of `groups`, in the order of their keys.

        consumes: episodes that the journal has no outcome for
        waits for: the engine, sandboxes and verifiers, in worker threads
        unblocked by: each episode's end, faults included
        produces: one record in the journal for each episode
        """
        recorded = self.journal.recorded(groups)
        missing = [e for group in groups for e in group.episodes if e.key not in recorded]
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="episode") as pool:
            futures = [pool.submit(self._play, episode, sampler_for) for episode in missing]
            try:
                for future in as_completed(futures):
                    ended = future.result()
                    recorded[ended.episode.key] = ended
                    on_ended(ended)
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        return [recorded[key] for key in sorted(recorded)]

    def _play(self, episode: Episode, sampler_for: Callable[[Task], Sampler]) -> RecordedEpisode:
        task = episode.task
        stage, message = "episode", "no attempt left"
        for attempt in range(self.journal.num_faults(episode.key), self.max_attempts):
            stage, trajectory = "episode", None
            try:
                trajectory = run_episode(
                    task,
                    self.domains[task.domain].make_env(self.sandboxes),
                    sampler_for(task),  # a sampler may remember where it is: each attempt gets a fresh one
                    self.chat,
                    seed=episode.seed,
                    max_context=self.max_context,
                    max_turns=self.max_turns,
                )
                stage = "verify"
                verdict = self.verify(task, trajectory.artifacts, self.sandboxes)
                return self.journal.record(episode, Scored(verdict), trajectory, attempt=attempt)
            except PolicyError as error:
                return self.journal.record(episode, PolicyFault(str(error)), trajectory, attempt=attempt)
            except TaskError as error:
                return self.journal.record(episode, TaskDefect(str(error)), trajectory, attempt=attempt)
            except JournalMismatch:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is ours: a fault, never a reward of 0
                message = f"{type(error).__name__}: {error}"
                self.journal.record_fault(episode.key, attempt, stage, message)
        return self.journal.record(episode, InfraFault(stage, message), None, attempt=self.max_attempts)


def by_group(groups: Sequence[Group], ended: Sequence[RecordedEpisode]) -> list[list[RecordedEpisode]]:
    """The ended episodes of each group, in the order of the groups."""
    of_key: dict[EpisodeKey, RecordedEpisode] = {e.episode.key: e for e in ended}
    return [[of_key[episode.key] for episode in group.episodes] for group in groups]
