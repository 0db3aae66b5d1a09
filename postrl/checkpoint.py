"""Checkpoints of the learner's state, by orbax. The frozen base is not in them: its digest is in the run's audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from postrl.learner.step import TrainState


class Checkpoints:
    """The `checkpoints/` of a run, numbered by the version of the policy that they hold."""

    def __init__(self, path: Path, max_to_keep: int = 2):
        # Two at least: a run may be killed between writing one and saying so in its journal, and then needs the one before.
        # Version 0 is never dropped (its number divides by every period): each resume begins from the cold start's result.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max(2, max_to_keep), keep_period=1 << 40, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(path.resolve(), options=options)

    def save(self, version: int, state: TrainState) -> str:
        """Writes the state and returns the checkpoint's name; on return it is on disk, whole."""
        if version in self._manager.all_steps():
            self._manager.delete(version)  # written by a run that was killed before it could say so
        self._manager.save(version, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        self._manager.wait_until_finished()
        return str(version)

    def restore(self, name: str, like: TrainState) -> TrainState:
        """The state saved under `name`, with the shapes and shardings of `like`."""
        abstract: Any = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
        restored: Any = self._manager.restore(int(name), args=arguments)
        return restored

    def close(self) -> None:
        self._manager.close()
