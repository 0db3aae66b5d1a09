"""What keepers know: about all sandboxes of a factory, and about their own."""

from __future__ import annotations

from dataclasses import dataclass

from . import cgroups


@dataclass(frozen=True)
class Options:
    """What is the same for all sandboxes of one zygote."""

    bwrap: str
    can_disable_userns: bool
    """False before bubblewrap 0.8: then a command may make user namespaces, whose processes still count as its own."""
    python_prefix: str
    cgroups: dict[str, str]
    """See `cgroups.detect`; empty: none can be used."""
    group_name: str
    """Names of control groups begin with it: `cgroups.owner_name` of the trainer, and something of this zygote's."""


@dataclass(frozen=True)
class Box:
    """One sandbox. Paths are those of the keeper's mount namespace."""

    bwrap: str
    can_disable_userns: bool
    root: str
    disk: str
    seccomp: str
    """File that holds the filter of system calls; empty where there is none for this machine."""
    host_uid: int | None
    """The host's user for commands; None: the keeper's own, inside its user namespace."""
    group: cgroups.Group | None
    memory_bytes: int
    """What all processes of a command may use together."""
