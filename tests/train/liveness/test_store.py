"""The client of the store against torch's own server, in both of its implementations (exact)."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from narrowgauge.train.liveness.store import ProtocolError, StoreClient


@pytest.fixture(params=[True, False], ids=["libuv", "threads"])
def served(request):
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )


def test_both_ends_see_what_the_other_wrote(served):
    theirs = dist.PrefixStore("run", dist.PrefixStore("narrowgauge-0-2", served))
    ours = StoreClient("127.0.0.1", served.port, "narrowgauge-0-2/run", 3)
    assert ours.get("beat-0") is None
    ours.set("beat-0", "größer")
    assert theirs.get("beat-0").decode() == "größer"
    theirs.set("told", "x" * 300_000)
    theirs.wait(["told"])  # torch sends without an answer
    assert ours.get("told") == "x" * 300_000
    assert ours.compare_set("failed", "", "first") == "first"
    assert theirs.compare_set("failed", "", "second") == b"first"
    assert ours.compare_set("failed", "", "third") == "first"
    ours.set("empty", "")
    assert ours.get("empty") == ""
    ours.close()


def test_a_server_that_is_no_store_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="does not answer as torch's TCPStore does"):
            StoreClient("127.0.0.1", server.getsockname()[1], "run", 3)
        thread.join()


def test_a_store_that_ends_is_an_error_and_not_a_wait():
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = StoreClient("127.0.0.1", served.port, "run", 3)
    ours.set("a", "1")
    port = served.port
    del served
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        for _ in range(100):
            ours.get("a")
    ours.close()
    with pytest.raises(ConnectionRefusedError):
        StoreClient("127.0.0.1", port, "run", 3)
