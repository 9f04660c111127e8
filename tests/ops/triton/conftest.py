"""Binaries of these tests are kept from run to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from narrowgauge.ops import triton
from narrowgauge.ops.cpp.build import cache_folder


@pytest.fixture(
    scope="package", autouse=True
)  # no longer: tests elsewhere ask whether Triton is here
def own_cache() -> Iterator[None]:
    """A folder of the user's own. Triton's keys name source, options, GPU and version, so what is found there is what would be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache_folder() / "tests" / "triton"))
        # Neither the interpreter nor a binary that is never launched needs the C compiler that a GPU's launcher is built with.
        patch.setattr(triton, "unavailable", lambda: "")
        yield
