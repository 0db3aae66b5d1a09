"""The shell domain in the real sandbox: turns, what counts, other right commands, wrong ones, forgeries."""

import collections

import pytest

from envs.shell import DOMAIN, SYSTEM, ShellEnv, generate
from envs.shell.kinds import KINDS, Problem
from envs.shell.words import CITIES, DIRECTORIES, EXTENSIONS, STEMS, WORDS
from postrl.contracts import Task
from tests.envs.episodes import play, sandboxes, sh, tasks_of
from verifiers.router import verify


def first(kind: str) -> tuple[Task, list[str]]:
    """A task of that kind, and the words of its reference command."""
    (task,) = tasks_of(DOMAIN, kind, 1)
    return task, task.reference[0].split("\n")[1].split()


def reward(task: Task, *replies: str) -> float:
    info = play(ShellEnv(sandboxes=sandboxes()), task, replies)[4]
    return verify(task, info["artifacts"], sandboxes()).reward


def alternatives():
    """Other right commands, by kind: what decides is the result."""
    task, (_, old, new) = first("rename")
    yield task, f"cat {old} > {new}; rm {old}"
    yield task, f"cp {old} /tmp/x && rm {old} && cp /tmp/x {new}"
    task, (_, _, n, name) = first("last_lines")
    yield task, f"tail -{n} {name}"
    yield task, f"tac {name} | head -n {n} | tac"
    task, (_, _, word, name) = first("count_matches")
    yield task, f"grep {word} {name} | wc -l"
    yield task, f"printf '%07.2f' $(grep -w {word} < {name} | wc -l)"
    task, (_, _, name, _, out) = first("sort_unique")
    yield task, f"sort {name} | uniq > {out}"
    yield task, f"awk '!seen[$0]++' {name} | sort | tee {out}"
    task, (_, _, field, name) = first("cut_column")
    yield task, f"awk -F, '{{print ${field[2:]}}}' {name}"
    task, words = first("sum_column")
    column, name = words[2].split("$")[1].rstrip("}"), words[-1]
    yield task, f"cut -d, -f{column} {name} | paste -sd+ | sed 's/.*/echo $((&))/' | bash"
    task, words = first("count_files")
    yield task, f"find {words[1]} -type f | wc -l"
    task, words = first("move_files")
    yield task, f"mkdir -p {words[1]}; for f in {words[4]}; do mv $f {words[1]}/; done"


def mistakes():
    """Wrong results that look right to a careless check."""
    task, (_, old, new) = first("rename")
    yield task, f"cp {old} {new}"
    yield task, f"mv {old} {new}.bak"
    yield task, f"rm {old}; touch {new}"
    yield task, f"ln -s {old} {new}"
    yield task, f"mv {old} {new}; echo hi > extra.txt"
    yield task, f"mkdir {new}; mv {old} {new}"
    yield task, f"mv {old} {new}; for f in *; do [ $f = {new} ] || rm $f; done"
    task, (_, _, n, name) = first("last_lines")
    yield task, f"tail -n {int(n) + 1} {name}"
    yield task, f"head -n {n} {name}"
    yield task, f"cat {name}"
    yield task, f"tail -n {n} {name} >&2"
    yield task, f"tail -n {n} {name}; rm {name}"
    task, (_, _, word, name) = first("count_matches")
    yield task, f"grep -c {word} {name}; wc -l < {name}"
    yield task, f"wc -l {name}"
    task, (_, _, name, _, out) = first("sort_unique")
    yield task, f"sort {name} > {out}"
    yield task, f"sort -u {name}"
    yield task, f"sort -ru {name} > {out}"
    yield task, f"sort -uo {name} {name}"
    task, (_, _, field, name) = first("cut_column")
    yield task, f"cut -d, -{field} {name} | head -n 3"
    task, words = first("move_files")
    yield task, f"mkdir {words[1]} && cp {words[4]} {words[1]}"
    yield task, f"mkdir {words[1]} && mv * {words[1]}"
    task, words = first("count_files")
    yield task, f"ls -a {words[1]} | wc -l"
    yield task, f"find {words[1].split('/')[0]} -type f | wc -l"


@pytest.mark.parametrize(("task", "command"), list(alternatives()))
def test_any_command_with_the_right_result_counts(task, command):
    assert reward(task, sh(command)) == 1.0


@pytest.mark.parametrize(("task", "command"), list(mistakes()))
def test_wrong_results_count_nothing(task, command):
    assert reward(task, sh(command)) == 0.0


def test_looking_shows_and_goes_on_and_its_output_does_not_count():
    task, (_, _, n, name) = first("last_lines")
    env = ShellEnv(sandboxes=sandboxes())
    env.reset(options={"task": task})
    look = f"```look\ntail -n {n} {name}\n```"
    observation, _, terminated, truncated, _ = env.step(look)
    assert observation == task.expected["stdout"].strip()
    assert (terminated, truncated) == (False, False)
    env.close()
    assert reward(task, look, look, look) == 0.0
    assert reward(task, look, *task.reference) == 1.0


def test_sh_ends_the_episode_even_when_it_failed():
    task, (_, old, new) = first("rename")
    env = ShellEnv(sandboxes=sandboxes())
    env.reset(options={"task": task})
    env.step("```look\nmv nothing.txt x\n```")
    observation, _, terminated, truncated, info = env.step(sh(f"mv {old} {new}; mv nothing.txt x"))
    assert observation.startswith("exit 1\nmv: ")
    assert "nothing.txt" in observation
    assert (terminated, truncated) == (True, False)
    assert verify(task, info["artifacts"], sandboxes()).success
    assert [record.exit_code for record in env.commands] == [1, 1]
    assert env.commands[0].argv == ("bash", "-c", "mv nothing.txt x")
    assert env.sandbox_s > 0


def test_a_killed_command_is_an_observation():
    task, _ = first("rename")
    env = ShellEnv(sandboxes=sandboxes())
    env.reset(options={"task": task})
    observation, _, terminated, truncated, _ = env.step("```look\nyes\n```")
    assert observation.startswith("killed: output\ny\n")
    assert (terminated, truncated) == (False, False)
    assert len(observation) <= 300
    env.close()


@pytest.mark.parametrize(
    "script",
    [
        "printf '{answer}' > stdout",
        "mkdir -p work; printf '{answer}' | tee stdout work/stdout ../stdout > /dev/null",
        "printf '{answer}' | tee verdict.json reward.txt reward.json report.json given.json left_out > /dev/null",
        "printf '{answer}' >&2",
        "printf '{answer}' > /dev/tty",
        "mkdir -p /verify && echo '{{}}' > /verify/given.json; printf '{answer}' > /verify/stdout",
    ],
)
def test_forgeries_count_nothing(script):
    task, _ = first("count_matches")
    answer = task.expected["stdout"].strip()
    assert reward(task, sh(script.format(answer=answer))) == 0.0


def test_many_files_and_odd_names_are_wrong_and_not_a_fault():
    task, (_, old, new) = first("rename")
    for script in (
        "for i in $(seq 100); do echo > a$i.txt; done",
        "d=$(printf 'd%.0s' $(seq 100)); mkdir -p $d/$d/$d && touch $d/$d/$d/x",
        "head -c 2000000 /dev/zero > a.bin",
        "mkfifo pipe; ln -s /etc/passwd a.txt; touch -- '-rf' 'a b' $'new\\nline'",
    ):
        assert reward(task, sh(f"{script}; mv {old} {new}")) == 0.0, script


def test_no_constant_answer_pays():
    answers = collections.defaultdict(collections.Counter)
    for index in range(4_000):
        task = generate("train", 0, index)
        answers[task.kind][(task.expected["stdout"], tuple(task.expected["changes"].items()))] += 1
    assert set(answers) == set(KINDS)
    for kind, counts in answers.items():
        assert counts.most_common(1)[0][1] <= 0.12 * counts.total(), kind


def test_no_prompt_occurs_in_both_splits():
    train = {generate("train", 0, index).prompt for index in range(4_000)}
    heldout = {generate("heldout", 0, index).prompt for index in range(400)}
    assert not train & heldout


def test_texts_fit_their_budgets():
    assert len(SYSTEM) <= 45 * 3.7
    for index in range(500):
        task = generate("train", 0, index)
        assert len(task.prompt) <= 30 * 3.7
        assert len(task.reference[0]) <= 25 * 3.7


def test_every_kind_has_two_phrasings():
    prompts = collections.defaultdict(set)
    for index in range(400):
        task = generate("train", 0, index)
        prompts[task.kind].add(task.prompt.split()[0])
    assert {kind: len(beginnings) for kind, beginnings in prompts.items()} == dict.fromkeys(KINDS, 2)


def test_kinds_take_turns():
    assert [generate("heldout", 0, index).kind for index in range(8)] == list(DOMAIN.kinds)


def test_words_are_distinct_and_no_word_holds_another():
    for words in (CITIES, DIRECTORIES, EXTENSIONS, STEMS, WORDS):
        assert len(words) == len(set(words))
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]


@pytest.mark.parametrize("wrong", [{}, {"stdout": ""}, {"stdout": " \n"}, {"changes": {"a.txt": "a\n"}}])
def test_a_problem_that_nothing_solves_is_refused(wrong):
    with pytest.raises(ValueError, match="would be solved by doing nothing"):
        Problem("Do it.", {"a.txt": "a\n"}, "true", **wrong)


@pytest.mark.parametrize(("split", "seed", "index"), [("test", 0, 0), ("train", -1, 0), ("train", 0, -1)])
def test_generate_refuses_what_names_no_task(split, seed, index):
    with pytest.raises(ValueError, match=r"expected one of|0 or more"):
        generate(split, seed, index)
