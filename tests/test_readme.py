"""The README says what is there: its tree names every file, and its commands name things that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "experiments/README.md")


def files_of_the_checkout() -> set[str]:
    """Tracked files and new ones that are not ignored: the test holds before a commit too. Without deleted ones.

    Empty ones are left out (`__init__.py` of packages without a word to say).
    """
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return {path for path in listed if path and (ROOT / path).is_file() and (ROOT / path).stat().st_size}


def files_of_the_tree() -> list[str]:
    """Paths of the README's tree, directories with a slash at the end, in order."""
    block = README.split("<!-- tree -->\n```text\n")[1].split("```")[0]
    paths, parents = [], []
    for line in block.splitlines():
        indent, name = re.fullmatch(r"((?:  )*)(\S+)(?:  +\S.*)?", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        parents = parents[: len(indent) // 2]
        paths.append("".join(parents) + name)
        if name.endswith("/"):
            parents.append(name)
    return paths


def test_the_tree_has_a_line_for_every_file_and_no_other():
    tree = files_of_the_tree()
    assert len(tree) == len(set(tree)), "a path stands twice in the tree"
    named = {path for path in tree if not path.endswith("/") and not path.startswith("tests/")}
    found = {path for path in files_of_the_checkout() if not path.startswith("tests/")}
    assert sorted(found - named) == [], "these files have no line in README.md, 'Files'"
    assert sorted(named - found) == [], "these lines of README.md, 'Files', name no file"


def test_the_tree_has_a_line_for_every_folder_of_tests():
    named = {path for path in files_of_the_tree() if path.startswith("tests/")}
    inside = [path.split("/") for path in files_of_the_checkout() if path.startswith("tests/")]
    folders = {f"tests/{parts[1]}/" for parts in inside if len(parts) > 2}
    assert named == folders | {"tests/"}


def commands(document: str) -> list[str]:
    """Command lines of the `bash` blocks, comments removed."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_a_document_names_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / document).read_text()
    named = re.findall(r"`(?:\w+=\S+ )*make ([a-z-]+)", text)
    named += [target for line in commands(document) for target in re.findall(r"\bmake ([a-z-]+)", line)]
    assert set(named) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_command_or_a_link_names_exists(document):
    files = files_of_the_checkout()
    named = [word for line in commands(document) for word in line.split() if re.search(r"\.(py|sh|yaml|ipynb)$", word)]
    missing = [word for word in named if word not in files]
    folder = (ROOT / document).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text())
    missing += [link for link in links if not (folder / link).exists()]
    assert missing == []


def test_modules_that_a_command_runs_exist():
    modules = [name for line in commands("README.md") for name in re.findall(r"python -m (postrl[.\w]*)", line)]
    assert modules
    for name in modules:
        path = ROOT / name.replace(".", "/")
        assert (path / "__main__.py").is_file() or path.with_suffix(".py").is_file()


def test_the_flags_that_the_readme_shows_are_fields_of_a_run():
    import tyro

    from experiments.quickstart import Arguments, config

    default = Arguments(config())
    shown = [line for line in commands("README.md") if "experiments/quickstart.py --" in line and "--help" not in line]
    assert shown
    for line in shown:
        flags = line.split("experiments/quickstart.py ")[1].split()
        assert tyro.cli(Arguments, default=default, args=flags) != default


def test_the_gymnasium_example_runs_in_an_interpreter_of_its_own():
    (example,) = re.findall(r"```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    ran = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Verdict(" in ran.stdout, "ls solves nothing, but ends the episode: the verdict says so"
