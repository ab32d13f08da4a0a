"""The control channel between a program and the workers that it started: frames over an authenticated loopback socket.

A frame is 4 bytes length of the header, 8 bytes length of the body (both big-endian), the header as JSON, and the body:
tensors in the safetensors format, or nothing. No pickle: what arrives can be wrong, but never runs.

The program listens on 127.0.0.1, on a port that the system picks; the first rank connects. Both prove with HMAC-SHA256
that they know the key (32 random bytes, handed over by pipe and environment) before anything else is read.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.safetensors_file import DTYPES, safetensors_pieces

LOOPBACK = "127.0.0.1"
KEY_BYTES = 32
MAX_HEADER = 4 * 2**20  # bytes; a plan of 1000 steps takes a quarter of a MiB
MAX_BODY = 16 * 2**30  # bytes; 10 s of 720p as float32 pictures are 2.5 GiB
_MAGIC = b"WanCore control 1\n"
_NONCE = 32
_LENGTHS = struct.Struct(">IQ")
_HELLO_SECONDS = 5.0  # for a peer to prove that it knows the key


class ChannelError(ConnectionError):
    """The peer sent what is no frame of this protocol."""


class ChannelClosed(ChannelError):
    """The peer is gone."""


class AuthenticationError(ChannelError):
    """The peer does not know the key."""


# -------------------------------------------------------------------------------------------------------------- tensors


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file in memory; nothing where there are no tensors."""
    return b"".join(safetensors_pieces(tensors, {})) if tensors else b""


def unpack_tensors(data: bytearray) -> dict[str, Tensor]:
    """The tensors of `pack_tensors`; they share `data`, which the library's own reader would copy. Raises ChannelError
    for anything else."""
    if not data:
        return {}
    try:
        length = int.from_bytes(data[:8], "little")
        if not 2 <= length <= min(MAX_HEADER, len(data) - 8):
            raise ValueError(f"a header of {length} bytes in {len(data)}")
        tensors = {}
        for name, entry in json.loads(data[8 : 8 + length]).items():
            dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
            if not 0 <= begin <= end <= len(data) - 8 - length:
                raise ValueError(f"{name} lies outside of the data")
            part = memoryview(data)[8 + length + begin : 8 + length + end]
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(entry["shape"])
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as fault:
        raise ChannelError(f"the tensors of a frame cannot be read: {fault}") from fault


# -------------------------------------------------------------------------------------------------------------- frames


class Channel:
    """One end of an authenticated connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raises ChannelClosed if the peer is gone, ValueError for a frame that is too large."""
        text = json.dumps(header).encode()
        pieces = list(safetensors_pieces(tensors, {})) if tensors else []
        body = sum(map(len, pieces))
        if len(text) > MAX_HEADER or body > MAX_BODY:
            raise ValueError(f"a frame of {len(text)} + {body} bytes; at most {MAX_HEADER} + {MAX_BODY} may be sent")
        with self._sending:
            try:
                self._socket.sendall(_LENGTHS.pack(len(text), body) + text)
                for piece in pieces:
                    self._socket.sendall(piece)
            except OSError as fault:
                raise ChannelClosed(f"the other end of the control channel is gone: {fault}") from fault

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next frame. Raises ChannelClosed if the peer is gone, ChannelError if it sends something else."""
        lengths = _read(self._socket, _LENGTHS.size)
        header, body = _LENGTHS.unpack(lengths)
        if header > MAX_HEADER or body > MAX_BODY:
            raise ChannelError(f"a frame announces {header} + {body} bytes: more than is allowed")
        try:
            said = json.loads(_read(self._socket, header))
        except ValueError as fault:
            raise ChannelError(f"the header of a frame is not JSON: {fault}") from fault
        if not isinstance(said, dict):
            raise ChannelError("the header of a frame is not a JSON object")
        return said, unpack_tensors(_read(self._socket, body))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer closed first
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._socket.close()


def _read(connection: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """deadline: of all of it by the monotonic clock, whatever arrives meanwhile; TimeoutError after it."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            got = connection.recv_into(view[done:])
        except TimeoutError:
            raise
        except OSError as fault:
            raise ChannelClosed(f"the other end of the control channel is gone: {fault}") from fault
        if not got:
            raise ChannelClosed("the other end of the control channel is gone")
        done += got
    return data


# ------------------------------------------------------------------------------------------------------- authentication


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _proof(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"\0".join([_MAGIC, role, *nonces]), "sha256")


class Listener:
    """Listens on a free loopback port for one peer that knows the key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._socket = socket.create_server((LOOPBACK, 0), backlog=8)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout: float, check: Callable[[], None] = lambda: None) -> Channel:
        """Connections without the key are closed, and waiting goes on. `check` is called ten times a second and may
        raise. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            check()
            self._socket.settimeout(0.1)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            try:
                self._challenge(connection)
                return Channel(connection)
            except OSError:  # no key, or the peer closed the connection
                connection.close()
        raise TimeoutError(f"no worker connected within {timeout:g} s")

    def _challenge(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _HELLO_SECONDS
        connection.settimeout(_HELLO_SECONDS)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_MAGIC + nonce)
        answer = bytes(_read(connection, _NONCE + 32, deadline))
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._key, b"worker", nonce, theirs)):
            raise AuthenticationError("wrong key")
        connection.sendall(_proof(self._key, b"program", theirs, nonce))

    def close(self) -> None:
        self._socket.close()


def connect(port: int, key: bytes, timeout: float = 30.0) -> Channel:
    """The worker's end. Raises AuthenticationError if either side has another key, else ChannelError or OSError."""
    connection = socket.create_connection((LOOPBACK, port), timeout)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        hello = bytes(_read(connection, len(_MAGIC) + _NONCE))
        if not hello.startswith(_MAGIC):
            raise ChannelError(f"what listens on port {port} is not a program of WanCore")
        nonce, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        connection.sendall(mine + _proof(key, b"worker", nonce, mine))
        try:
            answer = bytes(_read(connection, 32))
        except ChannelClosed as fault:
            raise AuthenticationError(f"the program on port {port} refused the key of this worker") from fault
        if not hmac.compare_digest(answer, _proof(key, b"program", mine, nonce)):
            raise AuthenticationError(f"the program on port {port} does not know the key of this worker")
        undo.pop_all()
        return Channel(connection)
