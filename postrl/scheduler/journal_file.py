"""The journal's file: its schema, and how it is opened by the one process that writes or by any that reads."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

from postrl.scheduler.journal_audit import PROMPTS_VIEW

SCHEMA_VERSION = 1
SCHEMA = f"""
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, phase TEXT NOT NULL, step INTEGER NOT NULL, group_index INTEGER NOT NULL,
    domain TEXT NOT NULL, kind TEXT NOT NULL, split TEXT NOT NULL, seed INTEGER NOT NULL, task_index INTEGER NOT NULL,
    task_id TEXT NOT NULL, content_digest TEXT NOT NULL, group_size INTEGER NOT NULL,
    UNIQUE (phase, step, group_index));
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups (id), member INTEGER NOT NULL,
    episode_seed INTEGER NOT NULL,
    UNIQUE (group_id, member));
CREATE TABLE outcomes (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes (id), attempt INTEGER NOT NULL, kind TEXT NOT NULL, reward REAL,
    success INTEGER NOT NULL, outcome TEXT NOT NULL, trajectory BLOB, digest TEXT NOT NULL);
CREATE TABLE faults (
    episode_id INTEGER NOT NULL REFERENCES episodes (id), attempt INTEGER NOT NULL, stage TEXT NOT NULL,
    message TEXT NOT NULL,
    PRIMARY KEY (episode_id, attempt));
CREATE TABLE steps (
    phase TEXT NOT NULL, step INTEGER NOT NULL, checkpoint TEXT, info TEXT NOT NULL,
    PRIMARY KEY (phase, step));
CREATE TABLE counted (
    group_id INTEGER PRIMARY KEY REFERENCES groups (id), phase TEXT NOT NULL, step INTEGER NOT NULL,
    FOREIGN KEY (phase, step) REFERENCES steps (phase, step));
{PROMPTS_VIEW};
"""


def _lock_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # The kernel frees the lock when the process ends, however it ends: a killed run leaves nothing to clean up.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise ValueError(
            f"{path.with_suffix('')} is being written by process {owner or '(unknown)'}; one run directory belongs to "
            "one run at a time: wait for it, end it, or choose another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _uri_path(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        connection.close()
        raise ValueError(
            f"{path} is a journal of version {version}; this postrl reads version {SCHEMA_VERSION}: continue the run "
            "with the postrl that began it, or choose another run directory"
        )


def open_for_reading(path: Path) -> tuple[sqlite3.Connection, None]:
    """A read-only connection, which may look on while a run writes. FileNotFoundError when there is nothing to read."""
    if not path.exists():
        raise FileNotFoundError(f"no journal at {path}")
    connection = sqlite3.connect(
        f"file:{_uri_path(path)}?mode=ro", uri=True, timeout=30, isolation_level=None, check_same_thread=False
    )
    _check_version(connection, path)
    return connection, None


def open_for_writing(path: Path) -> tuple[sqlite3.Connection, int]:
    """The writing connection and the descriptor of the lock that it holds; makes the file when it isn't there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_file(path.with_name(path.name + ".lock"))
    try:
        connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        _check_version(connection, path)
    except BaseException:
        os.close(lock)
        raise
    return connection, lock
