"""Which blocks of a model stay wide, how they are found, and how convert and describe deal with them (exact)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.recipe import HighPrecisionBlocks
from narrowgauge.structure import Block, blocks
from tests.compare import assert_same
from tests.raising import coded, raises
from tests.selection import quick
from tests.small_model import recipe_names


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(self.up(x)) for expert in self.experts)


class Model(nn.Module):
    def __init__(self, count: int = 7) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(count))})
        self.between = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.lm_head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body["layers"]:
            x = layer(x)
        return self.lm_head(self.between(x))


def test_the_share_is_taken_from_the_end_and_of_large_stacks_from_the_start_too():
    rule = HighPrecisionBlocks()
    assert {count: sorted(rule.indices(count)) for count in (1, 3, 4, 6, 7, 20, 32)} == {
        1: [], 3: [], 4: [3], 6: [5], 7: [5, 6], 20: [17, 18, 19], 32: [27, 28, 29, 30, 31],
    }  # fmt: skip
    # The 12B model of arXiv 2509.25149: 62 blocks, the first 2 and the last 8 in bf16.
    assert sorted(rule.indices(62)) == [0, 1, *range(54, 62)]


def test_a_stack_too_short_to_lose_a_block_keeps_none():
    """Under four blocks one would be more than a quarter of them."""
    for count in range(4):
        assert rule_names(Model(count)) == {"nvfp4"}
    assert rule_names(Model(4)) == {"nvfp4", "bf16"}


def rule_names(model):
    return {row.recipe for row in ng.describe(ng.convert(model, "nvfp4")) if row.recipe != "none"}


def test_blocks_are_the_outermost_numbered_list():
    """Experts are no blocks, nor is a Sequential of Linears."""
    found = blocks(Model(5))
    assert set(found.values()) == {Block("body.layers", index, 5) for index in range(5)}
    assert found["body.layers.3.experts.2.0"].index == 3
    assert "between.0" not in found and "lm_head" not in found


def test_each_stack_counts_for_itself():
    both = nn.ModuleDict(
        {"encoder": Model(4), "decoder": nn.Sequential(*(Layer() for _ in range(8)))}
    )
    counts = {block.stack: block.count for block in blocks(both).values()}
    assert counts == {"encoder.body.layers": 4, "decoder": 8}


def test_describe_says_which_block_and_why():
    rows = {row.name: row for row in ng.describe(ng.convert(Model(), "nvfp4"))}
    assert rows["body.layers.4.up"].recipe == "nvfp4" and rows["between.0"].recipe == "nvfp4"
    row = rows["body.layers.5.experts.0.0"]
    assert row.recipe == "bf16"
    assert row.note == (
        "block 6 of 7 in body.layers: nvfp4 keeps the last 15% of the blocks in bf16 (of 40 and more, 2 of them first)"
    )
    assert rows["between.0"].emulated and "FP4" in rows["between.0"].backend


def named(model):
    return {row.name.split(".")[2] for row in ng.describe(model) if row.recipe == "bf16"}


@pytest.mark.parametrize(
    ("patterns", "wide"),
    [
        ({"*": "nvfp4"}, {"5", "6"}),
        ({"*.up": "nvfp4"}, {"5", "6"}),
        ({"layers.*": "nvfp4"}, {"5", "6"}),
        ({"*": "nvfp4", "layers.5.*": "nvfp4"}, {"6"}),
        ({"*": "nvfp4", "body.layers.[56].*": "nvfp4"}, set()),
        ({"*": "nvfp4", "layers.[0-9]*.*": "nvfp4"}, set()),
        ({"*": "nvfp4", "layers.5-6.*": "nvfp4"}, set()),
        ({"*": "nvfp4", "layers.0-5.*": "nvfp4"}, {"6"}),
        ({"*": "nvfp4", "layers.2.*": "bf16"}, {"2", "5", "6"}),
        ({"*": replace(ng.recipes.NVFP4, wide_blocks=None)}, set()),
        (
            {"*": replace(ng.recipes.NVFP4, wide_blocks=HighPrecisionBlocks(share=0.5))},
            {"3", "4", "5", "6"},
        ),
    ],
)
def test_a_pattern_that_spells_out_the_block_overrides_the_rule(patterns, wide):
    model = ng.convert(Model(), patterns)
    assert named(model) == wide


def test_converting_again_and_back_forgets_the_rule():
    model = ng.convert(Model(), "nvfp4")
    assert named(ng.convert(model, "fp8-row")) == set()
    assert not any("block" in row.note for row in ng.describe(model))
    ng.convert(model, "nvfp4")
    model.body["layers"][6].up.recipe = ng.recipes.NVFP4
    assert next(row.note for row in ng.describe(model) if row.name == "body.layers.6.up") == ""
    ng.convert(model, None)
    assert not hasattr(model.body["layers"][6].up, "reason")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"share": 0}, coded("wideblocks.share", "share", "is 0")),
        ({"share": 1.0}, coded("wideblocks.share", "share")),
        ({"share": True}, coded("wideblocks.share", "share", "True")),
        ({"first": -1}, coded("wideblocks.first", "first", "is -1")),
        ({"smallest": 2.5}, coded("wideblocks.smallest", "smallest", "2.5")),
    ],
)
def test_rules_that_mean_nothing_are_refused(arguments, words):
    with raises(ConfigError, words):
        HighPrecisionBlocks(**arguments)
    with raises(ConfigError, "recipe.wide_blocks", "wide_blocks", "0.15"):
        ng.Recipe(name="x", wide_blocks=0.15)


# --- switch ------------------------------------------------------------------------------------------------------------------


def test_a_switch_widens_and_never_narrows():
    """From nvfp4 to FP8: the blocks in bf16 and the head stay what they are."""
    model = ng.convert(Model(), "nvfp4")
    changed = ng.switch(model, "fp8-row")
    names = recipe_names(model)
    assert (
        names["lm_head"] == "none"
        and names["body.layers.6.up"] == "bf16"
        and names["body.layers.0.up"] == "fp8-row"
    )
    assert set(changed) == {name for name, recipe in names.items() if recipe == "fp8-row"}
    with raises(ConfigError, "switch.no-change", "'nvfp4'", "grad_input"):
        ng.switch(model, "nvfp4")


def test_products_and_layers_are_switched_by_themselves():
    model = ng.convert(Model(), "mxfp4")
    ng.switch(model, "bf16", layers="layers.0.*", products=("output",))
    first, other = model.body["layers"][0].up.recipe, model.body["layers"][1].up.recipe
    assert (
        first.output == ng.Gemm()
        and first.grad_input == other.grad_input
        and first.grad_weight == other.grad_weight
    )
    assert first.name == "mxfp4+bf16:output" and other is ng.recipes.MXFP4
    assert model.body["layers"][0].experts[0][0].recipe is first
    ng.switch(model, "bf16", layers="layers.0.*", products=("grad_input", "grad_weight"))
    assert model.body["layers"][0].up.recipe is ng.recipes.BF16


# One of each family: rotated codes, a learned step, blocks.
@pytest.mark.parametrize(
    "start",
    quick(
        ["int4-hq-lss", "int4-lsq-luq", "nvfp4"],
        [name for name in ng.recipes.names() if "4" in name],
    ),
)
@pytest.mark.parametrize("products", [("output",), ("grad_input", "grad_weight")], ids=str)
def test_every_4_bit_recipe_can_be_switched_half(start, products):
    """Straight-through ones too, whose backward pass loses the codes of its forward one."""
    model, x = ng.convert(Model(), start), torch.randn(32, 32)
    ng.switch(model, "bf16", products=products)
    recipe = model.between[0].recipe
    assert all((gemm == ng.Gemm()) == (name in products) for name, gemm in recipe.gemms().items())
    model(x).sum().backward()
    assert model.between[0].weight.grad.isfinite().all()


def test_only_what_is_no_narrower_is_taken():
    """A recipe in bf16 forward keeps that, and takes the 8-bit backward."""
    half = ng.recipes.MXFP4.with_gemm(output=ng.Gemm())
    model = ng.convert(Model(), half)
    ng.switch(model, "fp8-current")
    recipe = model.between[0].recipe
    assert recipe.output == ng.Gemm() and recipe.grad_input == ng.recipes.FP8_CURRENT.grad_input
    assert recipe.save == ng.recipes.FP8_CURRENT.save


def test_a_switch_to_nvfp4_keeps_its_blocks_wide():
    model = ng.convert(Model(), replace(ng.recipes.MXFP4, name="other"))
    ng.switch(model, "nvfp4")
    assert named(model) == {"5", "6"}


def test_switched_layers_compute_by_their_new_recipe():
    """The same numbers as a model converted so from the start, weights cached by advance included (exact)."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 32)
    other = Model()
    other.load_state_dict(model.state_dict())
    ng.convert(model, "mxfp4")
    ng.advance(model)
    model(x)
    ng.switch(model, "fp8-row")
    assert_same(model(x), ng.convert(other, "fp8-row")(x))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recipe": "bf16", "layers": "layers.9.*"}, coded("pattern.no-match", "'layers.9.*'")),
        ({"recipe": "bf16", "products": ("forward",)}, coded("switch.products", "('forward',)")),
        ({"recipe": "bf16", "products": "forward"}, coded("switch.products", "('forward',)")),
        ({"recipe": "bf16", "products": ()}, coded("switch.products", "= ()")),
        ({"recipe": 8}, coded("switch.not-a-recipe")),
        ({"recipe": "fp9"}, coded("recipes.unknown", "'fp9'")),
        (
            {"recipe": "int4-hq-lss"},
            coded("switch.learned-steps", "'int4-hq-lss'"),
        ),
    ],
)
def test_switches_that_cannot_be_meant_are_refused(arguments, words):
    with raises(ConfigError, words):
        ng.switch(ng.convert(Model(), "mxfp4"), **arguments)


def test_members_are_called_by_their_own_names():
    """A Sequential may name its members, and a list may hold one module twice: the names are those of the model."""
    inner = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)]
    named_members = nn.Sequential(OrderedDict(first=inner[0], second=inner[1]))
    assert set(blocks(named_members)) == {"first.0", "second.0"}
    shared = nn.ModuleList([inner[0], inner[0], inner[1]])
    assert set(blocks(shared)) == {"0.0", "2.0"}
