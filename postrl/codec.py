"""Outcomes and finished trajectories as bytes, so that a journal or a wire can carry them. Never pickle.

An outcome is one line of JSON. A trajectory is `PTJ1`, the length of a JSON header, the header, and then the arrays and
small artifacts as raw little-endian bytes in the order in which the header names them; the whole is compressed with
zlib. Encoding is deterministic: equal trajectories give equal bytes.

The task itself is not stored: `(domain, split, seed, index)` generates it again, and decoding checks that it is the
one.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from postrl.contracts import (
    Cancelled,
    CommandRecord,
    Completion,
    Finding,
    InfraFault,
    Outcome,
    PolicyFault,
    Scored,
    StopReason,
    Task,
    TaskDefect,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)

MAGIC = b"PTJ1"
MAX_ARTIFACT_BYTES = 65_536
"""Larger artifacts are stored as a digest only: a policy may fill its disk in every episode of every step."""
MAX_ARTIFACTS_BYTES = 262_144
"""The same for all artifacts of one trajectory, in the order of their paths."""

_OUTCOME_NAMES: dict[type, str] = {
    Scored: "scored",
    PolicyFault: "policy_fault",
    InfraFault: "infra_fault",
    TaskDefect: "task_defect",
    Cancelled: "cancelled",
}
OUTCOME_NAMES = tuple(_OUTCOME_NAMES.values())


def outcome_name(outcome: Outcome) -> str:
    """`scored`, `policy_fault`, `infra_fault`, `task_defect` or `cancelled`."""
    return _OUTCOME_NAMES[type(outcome)]


def outcome_message(outcome: Outcome) -> str:
    """What a fault says about itself; empty for a scored episode."""
    match outcome:
        case Scored():
            return ""
        case Cancelled(reason):
            return reason
        case PolicyFault(message) | TaskDefect(message) | InfraFault(_, message):
            return message


# ------------------------------------------------------------------------------------------- verdicts and outcomes


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """JSON-like data; `parts` keep their order, floats survive exactly."""
    return {
        "reward": float(verdict.reward),
        "success": bool(verdict.success),
        "parts": {name: float(value) for name, value in verdict.parts.items()},
        "findings": [[finding.subject, finding.message] for finding in verdict.findings],
        "verifier": verdict.verifier,
    }


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    return Verdict(
        reward=data["reward"],
        success=data["success"],
        parts=dict(data["parts"]),
        findings=tuple(Finding(subject, message) for subject, message in data["findings"]),
        verifier=data["verifier"],
    )


def encode_outcome(outcome: Outcome) -> str:
    """One line of ASCII JSON. Raises ValueError on a number that isn't finite."""
    data: dict[str, Any] = {"kind": outcome_name(outcome)}
    match outcome:
        case Scored(verdict):
            data["verdict"] = verdict_json(verdict)
        case InfraFault(stage, message):
            data |= {"stage": stage, "message": message}
        case PolicyFault(message) | TaskDefect(message):
            data["message"] = message
        case Cancelled(reason):
            data["reason"] = reason
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def decode_outcome(text: str) -> Outcome:
    """The inverse of `encode_outcome`."""
    data = json.loads(text)
    match data["kind"]:
        case "scored":
            return Scored(verdict_from_json(data["verdict"]))
        case "policy_fault":
            return PolicyFault(data["message"])
        case "infra_fault":
            return InfraFault(data["stage"], data["message"])
        case "task_defect":
            return TaskDefect(data["message"])
        case "cancelled":
            return Cancelled(data["reason"])
        case kind:
            raise ValueError(f"outcome of kind {kind!r}; known kinds are {', '.join(OUTCOME_NAMES)}")


# --------------------------------------------------------------------------------------------------- trajectories


def _array_bytes(array: np.ndarray, dtype: str, name: str) -> bytes:
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise ValueError(
            f"{name}: expected a {np.dtype(dtype).name} array of rank 1, got {array.dtype.name} {array.shape}; "
            "make it so where it is produced, since a cast here would hide which values were sampled"
        )
    return np.ascontiguousarray(array).astype(dtype, copy=False).tobytes()


def _turn_parts(turn: Turn, index: int) -> tuple[dict[str, Any], list[bytes]]:
    completion, call = turn.completion, turn.call
    num_sampled = len(completion.token_T)
    if not (len(completion.logprob_T) == len(completion.version_T) == num_sampled):
        raise ValueError(
            f"turn {index}: {num_sampled} sampled tokens, {len(completion.logprob_T)} log-probabilities and "
            f"{len(completion.version_T)} versions; a completion has one of each per token"
        )
    header = {
        "text": turn.text,
        "call": None if call is None else [call.name, list(call.words), call.body],
        "observation": turn.observation,
        "stop": completion.stop.value,
        "num_prompt": len(turn.prompt_T),
        "num_sampled": num_sampled,
    }
    blobs = [
        _array_bytes(turn.prompt_T, "<i4", f"turn {index} prompt_T"),
        _array_bytes(completion.token_T, "<i4", f"turn {index} token_T"),
        _array_bytes(completion.logprob_T, "<f4", f"turn {index} logprob_T"),
        _array_bytes(completion.version_T, "<i4", f"turn {index} version_T"),
    ]
    return header, blobs


def _command_json(command: CommandRecord) -> list[Any]:
    return [
        list(command.argv),
        command.exit_code,
        float(command.wall_s),
        float(command.cpu_s),
        float(command.max_rss_mb),
        command.stdout_digest,
        command.stderr_digest,
        command.stdout_excerpt,
        command.stderr_excerpt,
        command.killed_by,
    ]


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The trajectory without its task's content, compressed.

    Artifacts within `MAX_ARTIFACT_BYTES` each and `MAX_ARTIFACTS_BYTES` together are kept; of the others only path,
    size and SHA-256. Raises ValueError on arrays of another dtype, rank or length than the contract says.
    """
    turns, blobs = [], []
    for index, turn in enumerate(trajectory.turns):
        header, turn_blobs = _turn_parts(turn, index)
        turns.append(header)
        blobs += turn_blobs
    artifacts, num_kept_bytes = [], 0
    for path in sorted(trajectory.artifacts):
        data = bytes(trajectory.artifacts[path])
        kept = len(data) <= MAX_ARTIFACT_BYTES and num_kept_bytes + len(data) <= MAX_ARTIFACTS_BYTES
        artifacts.append([path, len(data), hashlib.sha256(data).hexdigest(), kept])
        if kept:
            num_kept_bytes += len(data)
            blobs.append(data)
    header = {
        "task": trajectory.task.id,
        "content": trajectory.task.content_digest,
        "episode_seed": int(trajectory.episode_seed),
        "terminated": bool(trajectory.terminated),
        "truncated": bool(trajectory.truncated),
        "sandbox_s": float(trajectory.sandbox_s),
        "turns": turns,
        "commands": [_command_json(command) for command in trajectory.commands],
        "artifacts": artifacts,
    }
    # surrogatepass: output of hostile commands may decode to lone surrogates, and they must survive.
    header_bytes = json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    raw = b"".join([MAGIC, struct.pack("<I", len(header_bytes)), header_bytes, *blobs])
    return zlib.compress(raw, level=1)


class _Cursor:
    """Reads the blobs behind a header one after the other; refuses to read past the end."""

    def __init__(self, data: bytes, position: int):
        self.data, self.position = data, position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes < 0 or self.position + num_bytes > len(self.data):
            raise ValueError(f"trajectory payload is cut short: {num_bytes} bytes wanted at {self.position}")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def array(self, num: int, dtype: str) -> np.ndarray:
        # The copy is writable and in native byte order, like an array that was never stored.
        return np.frombuffer(self.take(4 * num), dtype).astype(np.dtype(dtype).newbyteorder("="))


def _open_payload(payload: bytes) -> tuple[dict[str, Any], _Cursor]:
    try:
        raw = zlib.decompress(payload)
    except zlib.error as error:
        raise ValueError(f"trajectory payload of {len(payload)} bytes doesn't decompress: {error}") from error
    if raw[:4] != MAGIC:
        raise ValueError(f"trajectory payload begins with {raw[:4]!r}; expected {MAGIC!r}")
    cursor = _Cursor(raw, 4)
    (num_header,) = struct.unpack("<I", cursor.take(4))
    return json.loads(cursor.take(num_header).decode("utf-8", "surrogatepass")), cursor


def artifact_digests(payload: bytes) -> dict[str, str]:
    """Path -> SHA-256 (hex) of every artifact that the episode had, kept or not."""
    header, _ = _open_payload(payload)
    return {path: digest for path, _, digest, _ in header["artifacts"]}


def decode_trajectory(payload: bytes, task: Task) -> Trajectory:
    """The inverse of `encode_trajectory`; `task` is the generated task again.

    Token ids, log-probabilities and versions come back bit for bit; artifacts that were too large are absent. Raises
    ValueError when the payload is damaged or belongs to another task.
    """
    header, cursor = _open_payload(payload)
    if (header["task"], header["content"]) != (task.id, task.content_digest):
        raise ValueError(
            f"the stored trajectory belongs to task {header['task']} (content {header['content'][:12]}), not to "
            f"{task.id} (content {task.content_digest[:12]}); the domain's generator changed since it was recorded"
        )
    turns = []
    for turn in header["turns"]:
        call = turn["call"]
        prompt_T = cursor.array(turn["num_prompt"], "<i4")
        token_T = cursor.array(turn["num_sampled"], "<i4")
        logprob_T = cursor.array(turn["num_sampled"], "<f4")
        version_T = cursor.array(turn["num_sampled"], "<i4")
        turns.append(
            Turn(
                prompt_T=prompt_T,
                completion=Completion(token_T, logprob_T, version_T, StopReason(turn["stop"])),
                text=turn["text"],
                call=None if call is None else ToolCall(call[0], tuple(call[1]), call[2]),
                observation=turn["observation"],
            )
        )
    artifacts = {path: cursor.take(num_bytes) for path, num_bytes, _, kept in header["artifacts"] if kept}
    return Trajectory(
        task=task,
        episode_seed=header["episode_seed"],
        turns=tuple(turns),
        terminated=header["terminated"],
        truncated=header["truncated"],
        artifacts=artifacts,
        commands=tuple(CommandRecord(tuple(argv), *rest) for argv, *rest in header["commands"]),
        sandbox_s=header["sandbox_s"],
    )
