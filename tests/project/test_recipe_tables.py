"""The tables of recipes in README.md and docs/recipes.md say what the registry says (exact): every recipe, its formats, tiles and devices.

A recipe without a row in the docs fails, and so does a row whose format, tile or device is another than the recipe's.
"""

from __future__ import annotations

import fnmatch
import json
import re

import pytest

from narrowgauge import recipes
from narrowgauge.formats import E3M0, INT4X2
from narrowgauge.ops.mm import KERNELS
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import WHOLE, Cast, Recipe
from tests.processes import ROOT

README, DOCS = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/recipes.md")
)
IN_WORDS = {
    INT4X2: r"two INT4 digits|two digits|the same",
    E3M0: r"powers of two",
}  # formats that are told, not named
DEVICES = {
    "Blackwell (10.x; 12.x without `mxfp4`)": (Device("cuda", (10, 0), cuda=(12, 9)), Device("cuda", (12, 0), cuda=(12, 9))),
    "Hopper (9.0)": (Device("cuda", (9, 0), cuda=(12, 9)), Device("cuda", (9, 0), cuda=(12, 8))),
    "Ada (8.9)": (Device("cuda", (8, 9), cuda=(12, 9)),),
    "Ampere (8.0, 8.6)": (Device("cuda", (8, 0), cuda=(12, 9)), Device("cuda", (8, 6), cuda=(12, 9))),
    "CPU": (Device("cpu", bf16_gemm=True, int8_gemm=True),),
}  # fmt: skip


def table(text: str, first: str, second: str = "") -> list[list[str]]:
    """The cells of the table whose first columns are these, without its header; the tests fail if there is none."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} | {second}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


ROWS = {
    f"{source}: {row[0]}": (recipes.get(named(row[0])[0]), row)
    for source, text, second in (("README", README, "forward"), ("docs", DOCS, "`x` and `w`"))
    for row in table(text, "recipe", second)
}


def casts(recipe: Recipe) -> list[Cast]:
    return [
        cast
        for gemm in recipe.gemms().values()
        for cast in (gemm.lhs, gemm.rhs)
        if cast is not None
    ]


def test_readme_names_recipes_once_in_the_order_of_the_registry() -> None:
    """The ones that most users need; docs/recipes.md has a row for every recipe."""
    rows = [named(row[0])[0] for row in table(README, "recipe", "forward")]
    assert rows == [name for name in recipes.names() if name in rows]


def test_the_docs_have_a_row_for_every_recipe() -> None:
    rows = [named(row[0])[0] for row in table(DOCS, "recipe", "`x` and `w`")]
    assert sorted(rows) == sorted(recipes.names())


@pytest.mark.parametrize(("recipe", "row"), ROWS.values(), ids=ROWS)
def test_a_row_has_the_formats_of_its_recipe(recipe: Recipe, row: list[str]) -> None:
    for cell, cast in ((row[1], recipe.output.lhs), (row[2], recipe.grad_input.lhs)):
        words = "bfloat16" if cast is None else IN_WORDS.get(cast.format, cast.format.name.upper())
        assert re.search(words, cell), (words, cell)


@pytest.mark.parametrize(("recipe", "row"), ROWS.values(), ids=ROWS)
def test_a_row_has_the_tiles_of_its_recipe(recipe: Recipe, row: list[str]) -> None:
    found = {tuple(map(int, tile.split("x"))) for tile in re.findall(r"\d+x\d+", row[3])}
    assert found == {cast.tile for cast in casts(recipe) if WHOLE not in cast.tile}


@pytest.mark.parametrize("place", range(1, 5))
def test_devices_compute_what_the_docs_say(place: int, triton_installed: None) -> None:
    """Row by row, for every recipe that the column names; of int4 the forward product, which all of them run as INT8."""
    header = (
        next(line for line in DOCS.splitlines() if line.startswith("| device |"))
        .strip("|")
        .split("|")[place]
    )
    matched = [fnmatch.filter(recipes.names(), each) for each in re.findall(r"`([\w*-]+)`", header)]
    names = set().union(*matched)
    rows = {row[0]: row[place] for row in table(DOCS, "device")}
    assert rows.keys() == DEVICES.keys() and all(matched)
    for title, devices in DEVICES.items():
        found = {
            how(recipes.get(name), device)
            for name in names
            for device in devices
            if not except_mxfp4(name, device)
        }
        assert found == set(
            re.findall(r"native|Triton|emulated", re.sub("else emulated", "", rows[title]))
        ), title


def except_mxfp4(name: str, device: Device) -> bool:
    return name == "mxfp4" and device.capability == (12, 0)


def how(recipe: Recipe, device: Device) -> str:
    chosen = KERNELS.choose(MmSpec(recipe.output.lhs, recipe.output.rhs, device)).kernel.name
    return {"reference": "emulated", "triton": "Triton"}.get(chosen, "native")


def test_no_aim_is_denied_by_the_predictions_beside_it():
    """An aim of docs/performance.md for a recipe's layer is not above 1 where the newest prediction for that card says slower."""
    rows = [
        json.loads(line)
        for line in (ROOT / "benchmarks/results/planned_time.jsonl").read_text().splitlines()
    ]
    gains = {
        (row["case"], row["card"]): row["gain_over_bf16"] for row in rows if "gain_over_bf16" in row
    }
    lines = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
    [stated] = [line for line in lines if "12-GEMM layer in `int8`" in line]
    for card in ("H200", "H100", "B200"):
        said = float(re.search(rf"(\d\.\d\d)× on an? {card}", stated)[1])
        assert abs(said - gains["layer, int8", card]) <= 0.0051, card
    aims = [line for line in lines if "≥" in line and line.startswith("|")]
    assert not [line for line in aims if "`int8`" in line and gains["layer, int8", "H200"] < 1]


def test_the_table_of_kernels_is_the_registry():
    rows = table((ROOT / "docs/gpu.md").read_text(encoding="utf-8"), "kernel", "products")
    assert [row[0] for row in rows] == [f"`{kernel.name}`" for kernel in KERNELS.kernels]
