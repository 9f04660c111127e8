"""Names on the Hub on a machine without a network: from the cache, or an error at once (exact)."""

from __future__ import annotations

import socket

import pytest

from narrowgauge.data import hub, tokenizer
from narrowgauge.errors import DataError
from tests.raising import raises


@pytest.fixture
def asked(monkeypatch):
    """No host answers; the list of connections that were tried."""
    found = []

    def refuse(address, timeout):
        found.append((address, timeout))
        raise OSError(101, "Network is unreachable")

    hub.unreachable.cache_clear()
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "_is_told_offline", lambda: False)
    yield found
    hub.unreachable.cache_clear()


def test_a_name_that_is_nowhere_is_an_error_after_one_look(asked, monkeypatch):
    monkeypatch.setattr(hub, "_is_cached", lambda name, file: False)
    for _ in range(2):
        with raises(DataError, "hub.unreachable", "some/model", "Network is unreachable"):
            hub.options("some/model")
    [((host, port), wait_s)] = asked
    assert (host, port) == ("huggingface.co", 443) and wait_s <= 5
    with raises(DataError, "hub.unreachable", "some/model"):
        tokenizer.load("some/model")


def test_a_name_in_the_cache_is_read_from_there(asked, monkeypatch):
    monkeypatch.setattr(hub, "_is_cached", lambda name, file: file == "tokenizer.json")
    assert hub.options("some/model") == {"local_files_only": True}


def test_folders_offline_mode_and_proxies_ask_nobody(asked, monkeypatch, tmp_path):
    assert hub.options(str(tmp_path)) == {}
    monkeypatch.setattr(hub, "_is_told_offline", lambda: True)
    assert hub.options("some/model") == {}
    monkeypatch.setattr(hub, "_is_told_offline", lambda: False)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert hub.options("some/model") == {} and not asked


def test_what_is_no_name_of_a_repository_is_left_to_the_library(asked):
    assert hub.options("no name at all!") == {"local_files_only": True}
