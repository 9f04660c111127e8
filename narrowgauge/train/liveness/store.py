"""Client for torch's TCPStore on the standard library alone, so that a sentinel starts in 30 ms.

The messages follow torch/include/torch/csrc/distributed/c10d/TCPStoreBackend.hpp, a header in
torch's wheel. Checked on torch 2.13. tests/train/liveness/test_store.py talks to torch's own
servers, so it fails if another torch changes the protocol.

    VALIDATE     byte 0, uint32 magic                             no answer
    PING         byte 13, uint32 nonce                            the nonce
    SET          byte 1, key, value                               no answer
    COMPARE_SET  byte 2, key, expected value, new value           the value after the call
    GET          byte 3, key, which has to exist                  the value
    CHECK        byte 5, uint64 count, keys                       byte 0 if all exist

Numbers are little-endian. Keys and values are a uint64 length and bytes. Every key begins with "/".
"""

from __future__ import annotations

import os
import socket
import struct

MAGIC = 0x3C85F7CE
VALIDATE, SET, COMPARE_SET, GET, CHECK, PING = 0, 1, 2, 3, 5, 13
STORE_S = 3.0  # limit for an answer
GONE_S = 3.0  # connections refused for longer mean that the store is gone
LARGEST_VALUE_BYTES = 1 << 20


class ProtocolError(OSError):
    """The server does not speak the protocol of torch's TCPStore."""


class StoreClient:
    """One connection to the store.

    prefix     prefix of every key, without the leading "/" that torch adds
    timeout_s  limit for each answer

    Every method raises OSError if the server is gone or silent for timeout_s.
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
        """Sets the key to `new` if its value is `expected` or if it does not exist.

        Returns the value after the call.
        """
        words = _sized(expected.encode()) + _sized(new.encode())
        self._socket.sendall(bytes([COMPARE_SET]) + self._key(key) + words)
        return self._value()

    def get(self, key: str) -> str | None:
        """The value of a key; None if it does not exist."""
        # GET requires an existing key: check first. Keys are never deleted, so there is no race.
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
