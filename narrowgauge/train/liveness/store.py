"""A client of torch's TCPStore that needs the standard library alone, so that it starts in 30 ms.

The messages are those of torch/include/torch/csrc/distributed/c10d/TCPStoreBackend.hpp, which torch
ships in its wheel. Checked on torch 2.13. tests/train/liveness/test_store.py talks to torch's own server, so
another protocol in another torch fails there.

    VALIDATE     byte 0, uint32 magic                             no answer
    PING         byte 13, uint32 nonce                            the nonce
    SET          byte 1, key, value                               no answer
    COMPARE_SET  byte 2, key, expected value, new value           the value after the call
    GET          byte 3, key; the key has to exist                the value
    CHECK        byte 5, uint64 count, keys                       byte 0 where all exist

Numbers are little-endian. Keys and values are a uint64 length and bytes. Every key begins with "/".
"""

from __future__ import annotations

import os
import socket
import struct

MAGIC = 0x3C85F7CE
VALIDATE, SET, COMPARE_SET, GET, CHECK, PING = 0, 1, 2, 3, 5, 13
STORE_S = 3.0  # for an answer
GONE_S = 3.0  # that connections are refused, until the store is taken for gone
LARGEST_VALUE_BYTES = 1 << 20


class ProtocolError(OSError):
    """The server does not answer as torch's TCPStore does."""


class StoreClient:
    """One connection. Every method raises OSError where the server is gone or silent for timeout_s.

    prefix   of every key, without the leading "/" that torch adds
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_s: float) -> None:
        self._prefix = f"/{prefix}/"
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            nonce = os.getpid() & 0xFFFFFFFF
            self._socket.sendall(struct.pack("<BIBI", VALIDATE, MAGIC, PING, nonce))
            if self._read(4) != struct.pack("<I", nonce):
                raise ProtocolError(f"{host}:{port} does not answer as torch's TCPStore does")
        except OSError:
            self._socket.close()
            raise

    def set(self, key: str, value: str) -> None:
        self._socket.sendall(bytes([SET]) + self._key(key) + _sized(value.encode()))

    def compare_set(self, key: str, expected: str, new: str) -> str:
        """The value after the call: `new` where the key had `expected`, or where it did not exist."""
        words = _sized(expected.encode()) + _sized(new.encode())
        self._socket.sendall(bytes([COMPARE_SET]) + self._key(key) + words)
        return self._value()

    def get(self, key: str) -> str | None:
        """None where the key does not exist."""
        self._socket.sendall(bytes([CHECK]) + struct.pack("<Q", 1) + self._key(key))
        if self._read(1) != b"\0":
            return None
        self._socket.sendall(bytes([GET]) + self._key(key))
        return self._value()

    def close(self) -> None:
        self._socket.close()

    def _key(self, key: str) -> bytes:
        return _sized((self._prefix + key).encode())

    def _value(self) -> str:
        (size,) = struct.unpack("<Q", self._read(8))
        if size > LARGEST_VALUE_BYTES:
            raise ProtocolError(f"a value of {size} bytes was announced")
        return self._read(size).decode(errors="replace")

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            if not part:
                raise ConnectionResetError("the store closed the connection")
            found += part
        return found


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
