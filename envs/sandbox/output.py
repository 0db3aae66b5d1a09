"""What a command prints: the beginning is kept, the rest read and dropped, the whole never held."""

from __future__ import annotations

import os

DRAIN_FACTOR = 64
"""A stream that brings more than this many times what is kept is endless for our purposes, and ends the command."""
_CHUNK = 1 << 16


class Output:
    """One stream of a command, read from the pipe `descriptor`, which this object owns."""

    def __init__(self, descriptor: int, max_bytes: int):
        self.descriptor = descriptor
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._num_bytes = 0

    def read_some(self) -> bool:
        """Reads what is there; False at the end of the stream."""
        chunk = os.read(self.descriptor, _CHUNK)
        self._num_bytes += len(chunk)
        self._kept += chunk[: self._max_bytes - len(self._kept)]
        return bool(chunk)

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    @property
    def truncated(self) -> bool:
        return self._num_bytes > len(self._kept)

    @property
    def endless(self) -> bool:
        return self._num_bytes > DRAIN_FACTOR * self._max_bytes

    def close(self) -> None:
        os.close(self.descriptor)
