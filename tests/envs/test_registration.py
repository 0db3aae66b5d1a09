"""Registration with Gymnasium, its own checker, and who imports whom."""

import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import envs
import verifiers
from tests.envs.episodes import sandboxes

ROOT = Path(__file__).parents[2]
IDS = ["postrl/Shell-v0", "postrl/CodeRepair-v0", "postrl/FilingFields-v0"]


@pytest.mark.parametrize("id_", IDS)
@pytest.mark.parametrize("kwargs", [{}, {"verify": None}], ids=["verified", "unverified"])
def test_gymnasiums_checker_has_nothing_to_say(id_, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(id_, **kwargs)
        check_env(env.unwrapped)
        env.close()


@pytest.mark.parametrize("id_", IDS)
def test_environments_are_made_by_module_and_id(id_):
    env = gymnasium.make(f"envs:{id_}")
    _, info = env.reset(seed=1)
    assert info["task_id"].startswith(f"{env.unwrapped.domain}/")
    env.close()


def test_a_factory_of_sandboxes_is_shared_and_not_copied():
    """Gymnasium copies an environment's arguments into its spec."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("postrl/Shell-v0", sandboxes=sandboxes())
        assert env.unwrapped._sandboxes is env.spec.kwargs["sandboxes"] is sandboxes()
        env.close()


def test_domains_are_complete_and_agree_with_their_environments():
    domains = envs.domains()
    assert list(domains) == ["shell", "code_repair", "filing_fields"]
    for name, domain in domains.items():
        env = domain.make_env(sandboxes())
        assert domain.name == env.domain == name
        assert env.generate("train", 0, 3) == domain.generate("train", 0, 3)
        assert env._verify is None
        assert len(domain.kinds) == len(set(domain.kinds)) >= 3


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_environments_load_neither_verifiers_nor_jax():
    code = (
        "import sys, envs; envs.domains(); "
        "print([name for name in ('verifiers', 'jax', 'torch', 'postrl.policy') if name in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_importing_registers_without_loading_the_families():
    code = "import sys, envs, gymnasium; print('envs.shell' in sys.modules, 'postrl/Shell-v0' in gymnasium.registry)"
    assert run_python(code) == "False True"


def test_ours_are_the_packages_that_are_imported():
    """Both names are also on PyPI."""
    assert Path(envs.__file__).parent == ROOT / "envs"
    assert Path(verifiers.__file__).parent == ROOT / "verifiers"
