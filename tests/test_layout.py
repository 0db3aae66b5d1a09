"""What may be where and who may import whom, beyond what import-linter sees."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["postrl", "envs", "verifiers"])
def test_the_packages_are_ours(name):
    """PyPI has an `envs` and a `verifiers` too."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / name


def tracked_files() -> list[Path]:
    """Files of the repository; all below the packages where there is no git (a source archive)."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [Path(name) for name in listed.stdout.split("\0") if name]
    return [p.relative_to(ROOT) for top in ("postrl", "envs", "verifiers") for p in (ROOT / top).rglob("*.py")]


def test_no_module_is_named_after_nothing_or_after_the_standard_library():
    """`utils.py` says nothing; a `types.py` or `math.py` shadows Python's own when its folder is on the path."""
    banned = {"utils", "common", "helpers", "misc"} | set(sys.stdlib_module_names)
    for path in tracked_files():
        if path.suffix == ".py":
            assert path.stem not in banned, path


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import postrl.contracts",
        "import envs, envs.shell, envs.code_repair, envs.filing_fields, envs.sandbox",
        "import verifiers.router",
        "import gymnasium, envs; [gymnasium.spec(i) for i in gymnasium.registry if i.startswith('postrl/')]",
    ],
)
def test_workers_never_load_jax(statement):
    """An environment worker on a CPU host starts in a fraction of JAX's import time."""
    loaded = loaded_by(statement)
    assert "numpy" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "torch"}


def test_contracts_need_numpy_and_the_standard_library_only():
    third_party = loaded_by("import postrl.contracts") - set(sys.stdlib_module_names) - loaded_by("import numpy")
    assert {name for name in third_party if not name.startswith("_")} == {"postrl"}
