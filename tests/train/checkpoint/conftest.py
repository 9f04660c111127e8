"""Ranks, for the checkpoints that several of them write."""

from tests.distributed.conftest import ranks

__all__ = ["ranks"]
