"""Names on the Hugging Face Hub, on a machine that may not reach it.

The libraries try a host that does not answer again and again, for minutes, before they look into
their cache. Here one look decides: a name whose files are in the cache is read from there, and a
name without them is an error at once.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from narrowgauge.errors import DataError

WAIT_S = 5.0  # for an answer of each of the host's addresses
# Files of which a model, or a tokenizer, has at least one.
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")


def options(name: str, setting: str = "") -> dict[str, Any]:
    """Arguments of a `from_pretrained` for a local folder or a name on the Hub.

    setting  name of the setting that holds it, for the error

    Returns {"local_files_only": True} where the host does not answer and the cache has the name.
    Raises DataError where the cache lacks it. Costs a connection, once per process.
    """
    if os.path.isdir(name) or _is_told_offline() or (reason := unreachable()) == "":
        return {}
    if any(_is_cached(name, file) for file in FILES):
        return {"local_files_only": True}
    raise _unreachable(f"{setting} = {name!r}" if setting else name, reason)


def refuse_data_set(source: str, name: str) -> None:
    """Raise DataError for a data set of the Hub that is not cached where the host does not answer.

    `datasets` would try for half a minute. source  the name as it was given, hf:NAME
    """
    if os.path.isdir(name) or _is_told_offline() or (reason := unreachable()) == "":
        return
    from huggingface_hub import constants

    own = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    folder = name.replace("/", "___")
    places = (
        os.path.join(own, folder),
        os.path.join(own, folder.lower()),
        os.path.join(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}"),
    )
    if not any(map(os.path.isdir, places)):
        raise _unreachable(source, reason)


def _unreachable(subject: str, reason: str) -> DataError:
    return DataError(
        f"{subject}: no folder here, and nothing of it in the cache. {_host()} cannot be reached ({reason}). "
        "Name a local folder or file, or connect this machine.",
        code="hub.unreachable",
    )


@cache
def unreachable() -> str:
    """Why the Hub cannot be reached, or ''. Behind a proxy nothing is known: ''."""
    if getproxies():
        return ""
    url = urlsplit(_endpoint())
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((_host(), port), timeout=WAIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _host() -> str:
    return urlsplit(_endpoint()).hostname or _endpoint()


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _is_told_offline() -> bool:
    """True if HF_HUB_OFFLINE is set: the libraries then ask no host."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_cached(name: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, file), str)
    except HFValidationError:  # no name of a repository; the library says so better
        return True
