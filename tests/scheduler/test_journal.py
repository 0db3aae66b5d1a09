"""The journal: exactly once, from many threads, and whole after kill -9 at any moment."""

import hashlib
import os
import random
import re
import select
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from postrl.codec import encode_trajectory
from postrl.contracts import InfraFault, Scored, Verdict
from postrl.scheduler.groups import EpisodeKey, episode_seed
from postrl.scheduler.journal import Journal, JournalMismatch
from tests.sample_episodes import sample_outcome, sample_task, sample_trajectory

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        yield journal


def draw(journal, step=0, *, phase="rl", num_tasks=2, group_size=2, run_seed=7):
    tasks = [sample_task(step * num_tasks + index) for index in range(num_tasks)]
    return journal.draw(phase, step, tasks, group_size=group_size, run_seed=run_seed)


def finish(journal, groups):
    for group in groups:
        for episode in group.episodes:
            journal.record(episode, sample_outcome(episode.seed), sample_trajectory(episode.task, episode.seed))


def same(first, second):
    return encode_trajectory(first) == encode_trajectory(second)


def test_seeds_are_fixed_and_distinct():
    # SHA-256 of "7/rl/3/1/0" begins with the bytes that this number is made of: changing it changes every run.
    digest = hashlib.sha256(b"7/rl/3/1/0").digest()
    expected = (digest[0] | digest[1] << 8 | digest[2] << 16 | digest[3] << 24) // 2
    assert episode_seed(7, EpisodeKey("rl", 3, 1, 0)) == expected
    keys = [EpisodeKey(p, s, g, m) for p in ("rl", "evaluate:rl") for s in range(4) for g in range(4) for m in range(4)]
    assert len({episode_seed(7, key) for key in keys}) == len(keys)


def test_draw_is_idempotent_across_reopening(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        first = draw(journal)
        assert draw(journal) == first
    with Journal.open(tmp_path / "j.db") as journal:
        assert draw(journal) == first
        assert journal.audit_counts().phases["rl"].num_prompts == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tasks": 3}, "drawn with 2 tasks and is now asked for with 3"),
        ({"group_size": 3}, "2 episodes.* 3 episodes"),
        ({"run_seed": 8}, "drawn with other seeds"),
    ],
)
def test_draw_with_another_config_is_refused(journal, change, message):
    draw(journal)
    with pytest.raises(JournalMismatch, match=message):
        draw(journal, **change)


def test_draw_notices_a_changed_generator(journal):
    task = sample_task(0)
    journal.draw("rl", 0, [task], group_size=1, run_seed=0)
    reworded = type(task)(**{**vars(task), "prompt": "Count them."})
    with pytest.raises(JournalMismatch, match=r"content [0-9a-f]{12}.*generator changed"):
        journal.draw("rl", 0, [reworded], group_size=1, run_seed=0)


def test_draw_refuses_an_unknown_phase(journal):
    with pytest.raises(ValueError, match="expected cold_start, rl or evaluate:<name>"):
        draw(journal, phase="warmup")


def test_outcome_comes_back_whole(journal):
    groups = draw(journal)
    episode = groups[1].episodes[0]
    assert journal.outcome(episode) is None
    trajectory, outcome = sample_trajectory(episode.task, episode.seed), sample_outcome(episode.seed)
    journal.record(episode, outcome, trajectory, attempt=2)
    found = journal.outcome(episode)
    assert (found.episode, found.attempt, found.outcome) == (episode, 2, outcome)
    assert same(found.trajectory, trajectory)
    assert list(journal.recorded(groups)) == [episode.key]


def test_second_record_must_be_identical(journal):
    episode = draw(journal)[0].episodes[0]
    trajectory = sample_trajectory(episode.task, episode.seed)
    outcome = Scored(Verdict(0.5, False, {}, (), "shell@1"))
    journal.record(episode, outcome, trajectory)
    journal.record(episode, outcome, trajectory)
    with pytest.raises(JournalMismatch, match="already ended in attempt 0"):
        journal.record(episode, Scored(Verdict(1.0, True, {}, (), "shell@1")), trajectory)
    with pytest.raises(JournalMismatch, match="another trajectory"):
        journal.record(episode, outcome, sample_trajectory(episode.task, episode.seed, text="ls"))
    with pytest.raises(JournalMismatch, match="attempt 1 brings"):
        journal.record(episode, outcome, trajectory, attempt=1)
    assert journal.audit_counts().phases["rl"].outcomes == {"shell": {"scored": 1}}


def test_record_refuses_strangers(journal, tmp_path):
    episode, other = draw(journal)[0].episodes
    with pytest.raises(JournalMismatch, match="the trajectory is of task"):
        journal.record(episode, sample_outcome(0), sample_trajectory(other.task, other.seed))
    with Journal.open(tmp_path / "other.db") as empty, pytest.raises(JournalMismatch, match="was never drawn"):
        empty.record(episode, sample_outcome(0), None)


def test_faults_count_attempts(journal):
    key = draw(journal)[0].episodes[0].key
    assert journal.num_faults(key) == 0
    journal.record_fault(key, 0, "sandbox", "bwrap died: \udcff")
    journal.record_fault(key, 0, "sandbox", "bwrap died: \udcff")
    journal.record_fault(key, 1, "verifier", "timeout")
    assert journal.num_faults(key) == 2
    with pytest.raises(JournalMismatch, match="already failed in sandbox"):
        journal.record_fault(key, 0, "sandbox", "another reason")
    counts = journal.audit_counts()
    assert counts.phases["rl"].faults == {"shell": {"sandbox": 1, "verifier": 1}}
    assert counts.num_faults == 2


def test_commit_counts_each_prompt_once(journal):
    groups = draw(journal)
    with pytest.raises(JournalMismatch, match="0 outcomes of 2"):
        journal.commit_step("rl", 0)
    assert journal.last_committed("rl") is None
    finish(journal, groups)
    journal.commit_step("rl", 0, checkpoint="step-0", info={"loss": 0.5})
    done = journal.last_committed("rl")
    assert (done.step, done.checkpoint, done.info) == (0, "step-0", {"loss": 0.5})
    finish(journal, draw(journal, 1))
    journal.commit_step("rl", 1)
    assert journal.last_committed("rl").step == 1
    assert journal.last_committed("rl", with_checkpoint=True).step == 0
    counts = journal.audit_counts()
    rl = counts.phases["rl"]
    assert (rl.num_prompts, rl.num_counted, rl.num_episodes, rl.num_open) == (4, 4, 8, 0)
    assert counts.problems() == ()


def test_repeated_step_commits_again_but_counts_once(journal):
    first = draw(journal, 0)
    finish(journal, first)
    journal.commit_step("rl", 0, info={"wall_s": 1})
    journal.commit_step("rl", 0, checkpoint="step-0", info={"wall_s": 2})
    assert journal.last_committed("rl").info == {"wall_s": 2}
    assert journal.audit_counts().phases["rl"].num_counted == 2
    second = draw(journal, 1)
    finish(journal, second)
    with pytest.raises(JournalMismatch, match="already counted in step 0"):
        journal.commit_step("rl", 1, groups=[*first, *second])
    with pytest.raises(JournalMismatch, match="the same prompts however often"):
        journal.commit_step("rl", 0, groups=first[:1])


def tampered(path: Path, *statements: str) -> tuple[str, ...]:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    with Journal.open(path, read_only=True) as journal:
        return journal.audit_counts().problems()


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (["DELETE FROM outcomes WHERE episode_id = 1"], "1 counted prompts lack an episode or its outcome"),
        (["DELETE FROM episodes WHERE id = 1"], "1 counted prompts lack an episode or its outcome"),
        (["DELETE FROM counted WHERE group_id = 1"], "1 prompts drawn up to step 2 were never counted"),
        (["UPDATE groups SET task_index = 0"], "5 prompts were drawn again"),
        (["DELETE FROM steps WHERE step = 1"], r"steps \[1\] were never committed"),
        (
            [
                "PRAGMA legacy_alter_table = ON",
                "CREATE TABLE c AS SELECT * FROM counted",
                "DROP TABLE counted",
                "ALTER TABLE c RENAME TO counted",
                "INSERT INTO counted VALUES (2, 'rl', 2)",
            ],
            "1 prompts were counted more than once",
        ),
    ],
)
def test_audit_recounts_and_sees_tampering(tmp_path, statements, problem):
    path = tmp_path / "journal.db"
    with Journal.open(path) as journal:
        for step in range(3):
            finish(journal, draw(journal, step))
            journal.commit_step("rl", step)
        assert journal.audit_counts().problems() == ()
    (found,) = tampered(path, *statements)
    assert re.search(problem, found)


def test_forget_trajectories_keeps_outcomes(journal):
    groups = draw(journal)
    finish(journal, groups)
    journal.commit_step("rl", 0)
    with pytest.raises(ValueError, match="may still be repeated: the last checkpoint on record is none"):
        journal.forget_trajectories("rl", 0)
    journal.commit_step("rl", 0, checkpoint="step-0")
    assert journal.forget_trajectories("rl", 0) == 4
    found = journal.recorded(groups)
    assert len(found) == 4
    assert all(row.trajectory is None for row in found.values())


def test_one_writer_many_readers(tmp_path):
    path = tmp_path / "journal.db"
    with pytest.raises(FileNotFoundError, match="no journal at"):
        Journal.open(path, read_only=True)
    with Journal.open(path) as writer:
        draw(writer)
        with pytest.raises(ValueError, match=f"being written by process {os.getpid()}"):
            Journal.open(path)
        with Journal.open(path, read_only=True) as reader:
            assert reader.audit_counts().phases["rl"].num_prompts == 2
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                draw(reader, 1)
    Journal.open(path).close()


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "journal.db"
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="version 99; this postrl reads version 1"):
            Journal.open(path)


def test_many_threads(journal):
    groups = draw(journal, num_tasks=8, group_size=8)
    episodes = [episode for group in groups for episode in group.episodes]

    def play(episode):
        if episode.seed % 2:
            journal.record_fault(episode.key, 0, "sandbox", "died")
        journal.record(
            episode,
            sample_outcome(episode.seed),
            sample_trajectory(episode.task, episode.seed),
            attempt=journal.num_faults(episode.key),
        )
        return journal.outcome(episode)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(play, episodes))
    assert [row.attempt for row in results] == [episode.seed % 2 for episode in episodes]
    assert len(journal.recorded(groups)) == 64
    journal.commit_step("rl", 0)
    assert journal.audit_counts().problems() == ()


WRITER = r"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from postrl.scheduler.journal import Journal
from tests.scheduler.test_journal import draw, sample_outcome, sample_trajectory

journal = Journal.open(sys.argv[1])
last = journal.last_committed("rl")

def play(episode):
    if episode.seed % 5 == 0 and journal.num_faults(episode.key) == 0:
        journal.record_fault(episode.key, 0, "sandbox", "died")
    journal.record(episode, sample_outcome(episode.seed), sample_trajectory(episode.task, episode.seed))
    key = episode.key
    os.write(1, f"episode {key.step} {key.group} {key.member}\n".encode())

with ThreadPoolExecutor(3) as pool:
    for step in range(last.step + 1 if last else 0, 10_000):
        groups = draw(journal, step, num_tasks=3, group_size=4)
        done = journal.recorded(groups)
        list(pool.map(play, [e for group in groups for e in group.episodes if e.key not in done]))
        journal.commit_step("rl", step, checkpoint=f"step-{step}")
        os.write(1, f"step {step}\n".encode())
"""


def run_and_kill(path: Path, num_lines: int) -> list[str]:
    """Runs the writer until it said `num_lines` things, kills it, and returns all that it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE, env={**os.environ}
    )
    said = b""
    while said.count(b"\n") < num_lines:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        chunk = os.read(process.stdout.fileno(), 65_536) if ready else b""
        assert chunk, f"the writer stopped by itself after {said!r}"
        said += chunk
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return said[: said.rfind(b"\n") + 1].decode().splitlines()


def test_killed_at_random_moments_nothing_is_lost_and_nothing_doubled(tmp_path):
    path = tmp_path / "journal.db"
    rng = random.Random(0)
    episodes: set[tuple[int, int, int]] = set()
    steps: set[int] = set()
    for _ in range(6):
        for line in run_and_kill(path, rng.randrange(1, 60)):
            kind, *numbers = line.split()
            key = tuple(int(number) for number in numbers)
            seen = steps if kind == "step" else episodes
            item = key[0] if kind == "step" else key
            assert item not in seen, f"{line} happened twice"
            seen.add(item)
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
        with Journal.open(path) as journal:
            counts = journal.audit_counts()
            assert counts.problems() == ()
            rl = counts.phases["rl"]
            # Steps are a prefix, every acknowledged one among them, at most the one in flight beyond.
            last_step = -1 if rl.last_step is None else rl.last_step
            assert rl.num_committed_steps == last_step + 1
            assert steps <= set(range(last_step + 1))
            found = {}
            for step in range(last_step + 2):
                if step <= last_step or rl.num_prompts > 3 * step:
                    found |= journal.recorded(draw(journal, step, num_tasks=3, group_size=4))
            keys = {(key.step, key.group, key.member) for key in found}
            # Three threads: at most three records were on disk but not yet acknowledged.
            assert episodes <= keys
            episodes, steps = keys, set(range(last_step + 1))
            assert rl.num_episodes == 12 * (rl.num_prompts // 3)
            for row in found.values():
                assert row.outcome == sample_outcome(row.episode.seed)
                assert same(row.trajectory, sample_trajectory(row.episode.task, row.episode.seed))
    assert len(steps) > 5


def test_infra_fault_is_an_outcome_without_reward(journal):
    groups = draw(journal, num_tasks=1)
    for episode in groups[0].episodes:
        journal.record(episode, InfraFault("sandbox", "gone"), None)
    journal.commit_step("rl", 0)
    ((reward,),) = {(row[0],) for row in journal._rows("SELECT reward FROM outcomes")}
    assert reward is None
