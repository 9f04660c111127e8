"""docs/models.md holds what the committed rows say, and at least 45 architectures (exact)."""

from __future__ import annotations

import json

from benchmarks.harness import RESULTS


def test_the_page_of_models_is_that_of_its_rows():
    from benchmarks import models

    rows = [json.loads(line) for line in (RESULTS / "models.jsonl").read_text("utf-8").splitlines()]
    assert models.PAGE.read_text("utf-8") == models.page(rows)
    assert len({row["model"] for row in rows}) >= 45
    assert all(row["finite"] == all(each is not None for each in row["losses"]) for row in rows)
