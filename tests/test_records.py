"""Parquet files: the same rows give the same bytes, tokens come back bit for bit, Grain reads them."""

import pickle

import grain
import numpy as np
import pandas
import pytest

from postrl.contracts import InfraFault
from postrl.records import TrajectorySource, concatenated, read_trajectories, trajectory_path, write_trajectories
from postrl.scheduler.groups import RecordedEpisode, make_group
from tests.sample_episodes import sample_outcome, sample_task, sample_trajectory


def rows_of(step: int, *, num_tasks: int = 2, group_size: int = 3, phase: str = "rl") -> list[RecordedEpisode]:
    """The last member of each group broke before it had a trajectory."""
    rows = []
    for index in range(num_tasks):
        group = make_group(phase, step, index, sample_task(index), group_size, run_seed=step)
        for episode in group.episodes[:-1]:
            trajectory = sample_trajectory(episode.task, episode.seed)
            rows.append(RecordedEpisode(episode, 0, sample_outcome(episode.seed), trajectory))
        rows.append(RecordedEpisode(group.episodes[-1], 2, InfraFault("sandbox", "bwrap died"), None))
    return rows


def test_path():
    assert trajectory_path("runs/a", "rl", 12).as_posix() == "runs/a/trajectories/rl-000012.parquet"
    assert trajectory_path("runs/a", "evaluate:base", 0).name == "evaluate-base-000000.parquet"


def test_concatenated_by_hand():
    trajectory = sample_trajectory(sample_task(), 3)
    first, second = trajectory.turns
    columns = concatenated(trajectory.turns)
    assert columns["token_T"].tolist() == [
        *first.prompt_T.tolist(),
        *first.completion.token_T.tolist(),
        *second.prompt_T.tolist(),
        *second.completion.token_T.tolist(),
    ]
    lengths = [len(first.prompt_T), len(first.completion.token_T), len(second.prompt_T), len(second.completion.token_T)]
    expected = [False] * lengths[0] + [True] * lengths[1] + [False] * lengths[2] + [True] * lengths[3]
    assert columns["is_policy_T"].tolist() == expected
    assert columns["version_T"].tolist() == [-1] * lengths[0] + [0] * lengths[1] + [-1] * lengths[2] + [1] * lengths[3]
    assert {name: array.dtype.name for name, array in columns.items()} == {
        "token_T": "int32",
        "is_policy_T": "bool",
        "logprob_T": "float32",
        "version_T": "int32",
    }


def test_tokens_come_back_bit_for_bit(tmp_path):
    rows = rows_of(0)
    path = write_trajectories(tmp_path / "rl-000000.parquet", rows)
    for row, read in zip(rows, read_trajectories(path), strict=True):
        key = row.episode.key
        assert (read["phase"], read["step"], read["group"], read["member"]) == ("rl", 0, key.group, key.member)
        if row.trajectory is None:
            assert read["token_T"] is None
            assert (read["outcome"], read["fault_stage"], read["message"]) == ("infra_fault", "sandbox", "bwrap died")
            assert (read["reward"], read["success"], read["attempt"]) == (None, False, 2)
            continue
        for name, array in concatenated(row.trajectory.turns).items():
            assert read[name].dtype == array.dtype
            assert read[name].tobytes() == array.tobytes()
        assert read["num_policy_tokens"] == row.trajectory.num_policy_tokens == read["is_policy_T"].sum()
        assert (read["num_turns"], read["num_tool_calls"], read["sandbox_s"]) == (2, 1, 0.5)


def test_texts_findings_and_parts(tmp_path):
    (row,) = [row for row in rows_of(0) if row.trajectory][:1]
    row = RecordedEpisode(row.episode, 0, sample_outcome(1), row.trajectory)
    (read,) = read_trajectories(write_trajectories(tmp_path / "a.parquet", [row]))
    assert read["findings"] == [{"subject": "lines", "message": "off by one"}]
    assert read["parts"] == [{"name": "lines", "value": 0.0}, {"name": "exit", "value": 1.0}]
    assert (read["reward"], read["success"], read["verifier"]) == (0.5, False, "shell@1")
    first, second = read["turns"]
    assert (first["prompt"], first["reply"]) == (row.episode.task.prompt, "wc -l 0")
    assert (first["call_name"], first["call_words"], first["call_body"]) == ("run", ["fast"], "wc -l 0")
    assert (second["prompt"], second["call_name"], second["stop"]) == ("observation 0", None, "length")
    assert read["commands"][0]["argv"] == ["sh", "-c", "wc -l"]


def test_same_rows_same_bytes_in_any_order(tmp_path):
    rows = rows_of(0)
    first = write_trajectories(tmp_path / "a" / "x.parquet", rows).read_bytes()
    second = write_trajectories(tmp_path / "b" / "x.parquet", rows[::-1]).read_bytes()
    assert first == second
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.parquet"]


def test_rewriting_replaces_what_a_killed_run_left(tmp_path):
    (tmp_path / ".x.parquet.partial").write_bytes(b"half a file")
    write_trajectories(tmp_path / "x.parquet", rows_of(0))
    write_trajectories(tmp_path / "x.parquet", rows_of(0, num_tasks=1))
    assert len(read_trajectories(tmp_path)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_an_episode_occurs_once(tmp_path):
    rows = rows_of(0)
    with pytest.raises(ValueError, match=r"occurs twice among the rows for x\.parquet"):
        write_trajectories(tmp_path / "x.parquet", [*rows, rows[0]])
    assert not list(tmp_path.iterdir())


def test_hostile_text_is_kept_readable(tmp_path):
    (row,) = [row for row in rows_of(0) if row.trajectory][:1]
    hostile = sample_trajectory(row.episode.task, row.episode.seed, text="</script>\x00\udcff\u202e")
    path = write_trajectories(tmp_path / "x.parquet", [RecordedEpisode(row.episode, 0, row.outcome, hostile)])
    assert read_trajectories(path)[0]["turns"][0]["reply"] == "</script>\x00\\udcff\u202e 0"


def test_empty_step_and_column_choice(tmp_path):
    write_trajectories(tmp_path / "a.parquet", [])
    write_trajectories(tmp_path / "b.parquet", rows_of(0))
    rows = read_trajectories(tmp_path, columns=["domain", "success"])
    assert len(rows) == 6
    assert set(rows[0]) == {"domain", "success"}


def test_pandas_opens_the_directory(tmp_path):
    for step in range(2):
        write_trajectories(trajectory_path(tmp_path, "rl", step), rows_of(step))
    frame = pandas.read_parquet(tmp_path / "trajectories")
    assert len(frame) == 12
    assert frame.groupby("outcome").size()["infra_fault"] >= 4
    assert frame["reward"].isna().sum() == frame["outcome"].eq("infra_fault").sum()


def test_grain_source(tmp_path):
    expected = []
    for step in range(3):
        rows = rows_of(step, num_tasks=25)  # 75 rows: two row groups a file
        write_trajectories(trajectory_path(tmp_path, "cold_start", step), rows)
        expected += [row for row in rows if row.trajectory is not None]
    source = TrajectorySource(tmp_path / "trajectories")
    assert len(source) == len(expected) == 150
    for index in (0, 49, 50, 99, 149):
        element, row = source[index], expected[index]
        assert element["task_id"] == row.episode.task.id
        assert (element["step"], element["group"], element["member"]) == (
            row.episode.key.step,
            row.episode.key.group,
            row.episode.key.member,
        )
        for name, array in concatenated(row.trajectory.turns).items():
            assert element[name].tobytes() == array.tobytes()
    with pytest.raises(IndexError, match="episode 150 of 150"):
        source[150]
    assert repr(source) == "TrajectorySource(episodes=150, files=3)"
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301, our own object: what Grain does for its workers
    assert copy[7]["token_T"].tobytes() == source[7]["token_T"].tobytes()

    dataset = grain.MapDataset.source(source).shuffle(seed=1).map(lambda element: element["token_T"].sum())
    assert sum(dataset) == sum(concatenated(row.trajectory.turns)["token_T"].sum() for row in expected)
    iterated = list(dataset.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))
    assert sum(iterated) == sum(dataset)


def test_source_reads_a_rewritten_file(tmp_path):
    path = tmp_path / "x.parquet"
    write_trajectories(path, rows_of(0))
    first = TrajectorySource(path)[0]["token_T"]
    write_trajectories(path, rows_of(1))
    assert TrajectorySource(path)[0]["token_T"].tobytes() != first.tobytes()
    assert np.isnan(TrajectorySource(path)[0]["reward"]) or TrajectorySource(path)[0]["reward"].dtype == np.float32
