"""The page on a ladder of debugging, over made-up losses: every rung in it, escaped, complete in itself (exact)."""

from __future__ import annotations

import math

import pytest

from narrowgauge.lab.ladder import Ladder, Rung
from tests.report.test_page import Page

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from narrowgauge.lab import ladder_page as report

FIX = "narrowgauge train --from 'a<b'@100 --recipe.switch 'bf16@100:output' --output NEW"


def made(recipe="int8", lost=0, refused="", **gaps):
    """A ladder of 40 steps whose rungs lie so far above BF16."""
    found = Ladder(
        recipe=recipe,
        begun=100,
        steps=40,
        asked=110,
        scores={"narrow": {"loss": 3.1}, "wide": {"loss": 3.0}},
    )
    while name := found.next():
        gap = gaps.get(name.replace(":", "_"), 0.0005 if name == "control" else 0.0)
        losses = [3.0 + 0.01 * math.sin(step) + gap for step in range(40)]
        if name == "again" and lost:
            found.rungs[name] = Rung(name=name, losses=losses[: lost - 101], lost=lost, spent_s=2.0)
        elif name == "product:grad_weight" and refused:
            found.rungs[name] = Rung(name=name, refused=refused)
        else:
            found.rungs[name] = Rung(name=name, losses=losses, spent_s=2.0)
    return found


def written(ladder, tmp_path, fix=FIX, run="a<b"):
    path = report.write(ladder, fix, run, tmp_path / "debug.html")
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "a<b" not in text
    return Page(text), text


def test_the_page_has_every_rung_the_sentence_and_the_line_to_use(tmp_path):
    ladder = made(again=0.1, product_grad_input=0.1, refused="it <cannot>")
    page, text = written(ladder, tmp_path)
    said = " ".join(page.text.split())
    assert ladder.conclusion() in said and FIX in said and ladder.repeats() in said
    assert all(name in said for name in ladder.rungs)
    assert "mends it: same within control" in said and "it <cannot>" in said and "+0.1000" in said
    assert 'class="notice bad"' in text and text.count("<svg") == 3  # one of them twice
    assert "differs" in said and "not taken" in said and "+0.1000" in said


@pytest.mark.slow
def test_a_lost_loss_and_a_run_without_narrow_products_have_pages_too(tmp_path):
    page, text = written(made(again=0.1, lost=105), tmp_path, fix="")
    assert "not finite at step 105" in page.text and "narrowgauge train" not in page.text
    page, text = written(made(again=math.nan, bf16=math.nan, control=math.nan), tmp_path)
    assert "Distance from BF16" not in page.text
    wide = made(recipe="")
    page, text = written(wide, tmp_path, fix="")
    assert wide.conclusion() in " ".join(page.text.split()) and 'class="notice same"' in text
    page, text = written(made(), tmp_path, fix="")
    assert "the cause is not the number format" in page.text and 'class="notice same"' in text
