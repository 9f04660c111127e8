"""Runs of these tests share corpus, tokenizer and cache with those of tests/train."""

from __future__ import annotations

from tests.train.conftest import (  # noqa: F401
    before_step,
    make,
    own_text,
    reports,
    text,
    with_report,
)
