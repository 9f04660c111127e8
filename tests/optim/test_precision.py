"""The ladder of precisions (exact)."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import ConfigError
from narrowgauge.optim import PRECISIONS, precision
from tests.raising import raises


def test_every_rung_has_its_name_and_an_unknown_one_the_closest() -> None:
    assert list(PRECISIONS) == ["fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3"]
    with raises(ConfigError, "precision.unknown", "'bf16-02'", "'bf16-o2'"):
        precision.get("bf16-02")


def test_the_table_in_the_docs_is_that_of_the_list() -> None:
    """`python -c "from narrowgauge.optim.precision import table; print(table())"` writes it."""
    docs = Path(__file__, "../../../docs/recipes.md").resolve().read_text(encoding="utf-8")
    assert precision.table() in docs


def test_a_keep_list_is_the_precisions_own_unless_it_is_named() -> None:
    own = precision.get("bf16-o2")
    assert own.keep_list() == ("norms", "softmax") and own.keep_list("none") == ()
    assert own.keep_list("norms, lm_head") == ("norms", "lm_head")
    assert precision.get("bf16-o3").keep_list() == ()
