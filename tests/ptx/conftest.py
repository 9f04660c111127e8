"""Binaries of these tests are kept from run to run, with those of tests/ops/triton."""

from __future__ import annotations

from tests.ops.triton.conftest import own_cache

__all__ = ["own_cache"]
