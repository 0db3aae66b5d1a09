"""Messages between the trainer, the zygote and the keepers: a length, JSON, and file descriptors beside it.

Both ends are ours and trusted; nothing that runs in a sandbox ever holds one of these sockets.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS = 4


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message. The descriptors stay open on this side. Raises OSError when the other end is gone."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the descriptors that came with it (close-on-exec); None when the other end is gone."""
    try:
        head, descriptors = _first_bytes(connection)
        head += _exactly(connection, _LENGTH.size - len(head))
        return json.loads(_exactly(connection, _LENGTH.unpack(head)[0])), descriptors
    except (ConnectionError, EOFError):
        return None, []


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _first_bytes(connection: socket.socket) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds: it drops its flags (CPython 3.11), so what it receives would be inherited by every command.
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * struct.calcsize("i"))
    data, ancillary, _, _ = connection.recvmsg(_LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not data:
        raise EOFError
    return data, list(descriptors)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
