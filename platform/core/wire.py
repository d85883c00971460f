"""Framing of messages between this project's processes: 8 bytes with the length, then the content.

    pipe      `pack` and `read`     the engine process's configuration, the constraint checker
    socket    `send` and `receive`  ranks and the adapters' reader: JSON, and descriptors of files

The engine process's other messages are msgpack over ZeroMQ, which frames them itself.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import IO, Any

MAX_BYTES = 1 << 30
"""Largest message. The modules of a large model for the adapters' reader take some megabytes."""
_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("i")
_CHUNK = 1 << 20


def pack(content: bytes) -> bytes:
    """A message with this content."""
    return _LENGTH.pack(len(content)) + content


def read(stream: IO[bytes]) -> bytes:
    """Wait for the content of the next message of a pipe; EOFError if it ends before."""
    header = stream.read(_LENGTH.size)
    content = stream.read(_decode_length(header)) if len(header) == _LENGTH.size else b""
    if len(header) != _LENGTH.size or len(content) != _decode_length(header):
        raise EOFError("the other process is gone")
    return content


def send(connection: socket.socket, message: Any, descriptor: int | None = None) -> None:
    """Send a message of JSON, and the descriptor of a file; OSError if the other process is gone."""
    data = memoryview(pack(json.dumps(message).encode()))
    if descriptor is not None:
        data = data[socket.send_fds(connection, [data], [descriptor]) :]
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message. Returns it with the descriptors that came with it, which the caller must close.

    Raises:
        EOFError, OSError: the other process is gone. TimeoutError: the socket's timeout has passed.
    """
    # Not `recv_fds`, which lacks the flag: child processes must not inherit the descriptors.
    header, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    found = [
        _INT.unpack(data[: _INT.size])[0]
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    ]
    try:
        header += _receive(connection, _LENGTH.size - len(header)) if header else b""
        if not header:
            raise EOFError("the other process is gone")
        return json.loads(_receive(connection, _decode_length(header))), found
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer with bytes that follow a message; EOFError, OSError: the other process is gone."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise EOFError("the other process is gone")
        buffer = buffer[count:]


def _decode_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_BYTES:
        raise OSError(f"a message of {length} bytes is announced, and the largest has {MAX_BYTES}")
    return int(length)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    content = bytearray()
    while len(content) < size:
        data = connection.recv(min(_CHUNK, size - len(content)))
        if not data:
            raise EOFError("the other process is gone")
        content += data
    return bytes(content)
