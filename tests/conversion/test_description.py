"""The table of `describe`: why a layer is what it is, what convert cannot reach, and which rows share a line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgauge as ng
from narrowgauge.conversion.description_text import NOT_FUSED, Note, spelled, without_block_numbers
from narrowgauge.ops.mm.spec import OTHER_GPUS, ROCM
from narrowgauge.ops.registry import Device
from narrowgauge.structure import is_linear
from tests.raising import warns, with_code
from tests.small_model import IDS, Model, recipe_names


def test_describe_says_why_a_layer_was_kept() -> None:
    rows = {row.name: row for row in ng.describe(ng.convert(Model(), "fp8-current"))}
    assert rows["lm_head"].note == "output head"
    assert rows["layers.0.gate"].note.startswith("router")
    assert "no FP8 units" in rows["layers.0.up_proj"].backend
    assert "emulated exactly" in rows["layers.0.up_proj"].backend


def test_frozen_and_subclassed_layers_are_told() -> None:
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    attention = nn.MultiheadAttention(32, 2)
    model = nn.Sequential(
        nn.Linear(32, 32), Own(32, 32), nn.Linear(32, 8), nn.Linear(32, 40), attention.out_proj
    )
    model[0].weight.requires_grad_(False)
    rows = ng.describe(ng.convert(model, "fp8-current"))
    assert [row.recipe for row in rows] == ["fp8-current", "none", "none", "fp8-current", "none"]
    assert [note.code for row in rows for note in row.notes] == [
        "frozen",
        "own-forward",
        "too-small",
        "padded",
        "own-class",
    ]
    for row, value in zip(
        rows[1:], ("Own", "16", "16", "NonDynamicallyQuantizableLinear"), strict=True
    ):
        assert value in row.note


def test_it_is_said_which_16_bits_a_product_takes() -> None:
    """Of a float16 model the recipe bf16 multiplies in float16."""
    types: list[bool] = []
    for recipe, dtype in itertools.product(
        ("bf16", "fp8-current"), (torch.float16, torch.bfloat16)
    ):
        model = ng.convert(nn.Sequential(nn.Linear(32, 32, dtype=dtype)), recipe)
        [row] = ng.describe(model)
        assert bool(with_code(row.notes, "float16")) == (
            recipe == "bf16" and dtype == torch.float16
        )
        if recipe == "bf16":
            model[0].observer = lambda gemm, role, original, operand, dtype=dtype: types.append(
                operand.dtype == dtype
            )
            model(torch.randn(4, 32, dtype=dtype)).sum().backward()
    assert len(types) == 8 and all(types)


def unconverted(model: nn.Module, code: str) -> dict[str, str]:
    """Name -> shape of the rows without a recipe whose note has the code."""
    rows = [row for row in ng.describe(model) if with_code(row.notes, code)]
    assert {row.recipe for row in rows} <= {"none"} and {row.output for row in rows} <= {
        "no nn.Linear"
    }
    return {row.name: row.shape for row in rows}


def test_attention_of_torch_without_a_recipe_keeps_its_own_projection() -> None:
    attention, split = nn.MultiheadAttention(32, 2), nn.MultiheadAttention(32, 2, kdim=16, vdim=48)
    model = nn.Sequential(attention, nn.Linear(32, 32), split)
    ng.convert(model, {"1": "fp8-current"})
    names = recipe_names(model)
    assert names.pop("1") == "fp8-current"
    assert set(names.values()) == {"none"} and {"0.out_proj", "2.out_proj"} < set(names)
    assert unconverted(model, "attention") == {
        "0.in_proj_weight": "32 -> 96",
        "2.q_proj_weight": "32 -> 32", "2.k_proj_weight": "16 -> 32", "2.v_proj_weight": "48 -> 32",
    }  # fmt: skip
    assert unconverted(attention, "attention") == {"in_proj_weight": "32 -> 96"}, (
        "as the model itself"
    )


def test_transposed_layers_of_transformers_are_linears() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))
    assert [row.name for row in ng.describe(model)][-1] == "lm_head", "in the order of the model"
    block = {
        "attn.c_attn": "32 -> 96",
        "attn.c_proj": "32 -> 32",
        "mlp.c_fc": "32 -> 128",
        "mlp.c_proj": "128 -> 32",
    }
    expected = {
        f"transformer.h.{index}.{name}": shape
        for index in range(2)
        for name, shape in block.items()
    }
    rows = ng.describe(model)
    assert {row.name: row.shape for row in rows if row.name != "lm_head"} == expected
    assert {row.output for row in rows} == {"ordinary Linear"}
    assert len(with_code([note for row in rows for note in row.notes], "not-converted")) == 8
    assert "transformer.h.*.attn.c_attn (2 layers)  32 -> 96" in str(
        ng.describe(ng.convert(model, "fp8-current"))
    )


def test_experts_in_one_parameter_are_told() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model, experts = MixtralForCausalLM(sizes), "model.layers.0.mlp.experts"
    stacks = {
        f"{experts}.gate_up_proj": "4 experts of 96 x 32",
        f"{experts}.down_proj": "4 experts of 32 x 48",
    }
    assert {row.name: row.shape for row in ng.describe(model) if "experts" in row.name} == stacks
    ng.convert(model, {"*": "fp8-current", "*.experts": None})
    assert {row.name: row.shape for row in ng.describe(model) if "experts" in row.name} == stacks
    assert recipe_names(model)["model.layers.0.self_attn.q_proj"] == "fp8-current"
    ng.convert(model, "fp8-current")
    own = {row.name: row.shape for row in ng.describe(model) if "experts" in row.name}
    assert own == {
        f"{experts}.{index}.{name}": shape
        for index in range(4)
        for name, shape in (("gate_up_proj", "32 -> 96"), ("down_proj", "48 -> 32"))
    }
    assert {row.recipe for row in ng.describe(model) if "experts" in row.name} == {"fp8-current"}


def test_other_weights_with_three_axes_have_no_row() -> None:
    class PerExpert(nn.Conv1d):
        """A convolution whose class is named after experts."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 16, 32))

    model = nn.Sequential(nn.Conv1d(32, 32, 3), PerExpert(32, 32, 3), Embedded(), nn.Linear(32, 32))
    assert [row.name for row in ng.describe(model)] == ["3"]


def test_a_sampler_that_has_predicted_nothing_yet_says_so() -> None:
    """The prediction comes with the first backward pass."""
    model = ng.convert(Model(), "int4-hq-lss")
    row = next(row for row in ng.describe(model) if row.name == "layers.0.up_proj")
    assert with_code(row.notes, "sampling-unread") and "inf" not in row.note
    model(IDS).square().mean().backward()
    ng.advance(model)
    row = next(row for row in ng.describe(model) if row.name == "layers.0.up_proj")
    assert not with_code(row.notes, "sampling-unread")
    assert (
        all(note.readings for note in with_code(row.notes, "sampling"))
        and "grad_weight" in row.note
    )


def test_description_groups_equal_layers() -> None:
    text = str(ng.describe(ng.convert(Model(), "fp8-current")))
    assert "layers.*.up_proj (3 layers)" in text
    assert text.isascii()
    assert "recipe=fp8-current" in repr(ng.convert(Model(), "fp8-current"))


def test_layers_that_differ_in_a_reading_alone_share_a_line() -> None:
    model = ng.convert(Model(), "int4-hq-lss")
    for index, value in enumerate((0.5, 0.25, 1.5)):
        model.layers[index].up_proj.sampling.variance.copy_(torch.tensor([0.0, value]))
    text = str(ng.describe(model))
    assert (
        "layers.*.up_proj (3 layers)" in text
        and "sampling adds 0.25 to 1.5 relative variance" in text
    )
    model.layers[1].up_proj.sampling.decide([0.0, 0.0])  # one does something else: not alike
    text = str(ng.describe(model))
    assert "layers.0,2.up_proj (2 layers)" in text and "layers.1.up_proj  " in text


def llama_of(depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, vocab_size=64,
            num_hidden_layers=depth,
        )
    )  # fmt: skip


def bert_of(depth: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64, num_hidden_layers=depth
        )
    )  # fmt: skip


def experts_of(depth: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, vocab_size=64,
            num_hidden_layers=depth, num_local_experts=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [bert_of, llama_of, experts_of])
def test_one_screen_whatever_the_depth(build: Callable[[int], nn.Module]) -> None:
    """24 lines of 100 columns; the last one counts all layers and weights."""
    texts = []
    for depth in (2, 6):
        model = ng.convert(build(depth), "int8", fuse=True)
        rows = ng.describe(model)
        texts.append(str(rows).splitlines())
        weights = sum(each.weight.numel() for each in model.modules() if is_linear(each))
        assert f"{len(rows)} layers, {weights:,} weights" in " ".join(texts[-1])
    assert max(map(len, texts)) <= 24 and max(len(line) for text in texts for line in text) <= 100
    assert abs(len(texts[0]) - len(texts[1])) <= 1, "only the widths of numbers differ"


def test_no_name_stands_among_the_fused_and_the_others() -> None:
    """BERT's norms after the last block are read by no attention: their block is named."""
    text = str(ng.describe(ng.convert(bert_of(3), "int8", fuse=True)))
    fused, _, others = text.partition(NOT_FUSED)
    assert "encoder.layer.0-1.output.LayerNorm" in fused
    assert "encoder.layer.2.output.LayerNorm" in others


@pytest.mark.parametrize("back", [False, True], ids=["never converted", "converted back"])
def test_a_model_without_recipes_says_so(back: bool) -> None:
    """No pattern was given, so none is blamed."""
    model = llama_of(1)
    if back:
        ng.convert(ng.convert(model, "fp8-current"), None)
    codes = {note.code for row in ng.describe(model) for note in row.notes}
    assert codes == {"not-converted", "kept"}


def test_numbers_in_reasons_stay() -> None:
    kept = "heads of 96, with 0.5 of 2.13"
    assert without_block_numbers(kept) == kept
    assert without_block_numbers(f"model.layers.11.mlp.gate: {kept}") == (
        f"model.layers.*.mlp.gate: {kept}"
    )


def test_blocks_are_counted_in_ranges() -> None:
    names = [f"layers.{number}.up" for number in (0, 1, 2, 5, 7, 8)]
    assert spelled(names, ["layers.3.up", *names]) == "layers.0-2,5,7-8.up"
    assert spelled(names, ["layers.3.down", *names]) == "layers.*.up"
    assert spelled(names[:1], names) == names[0]


def test_spans_of_readings_are_numbers_not_words() -> None:
    notes = [Note("a (adds ", " variance)", (value,)) for value in (9.0, 10.0, 2e-5)]
    assert len({note.without_readings() for note in notes}) == 1
    assert str(Note.spanning(notes)) == "a (adds 2e-05 to 10 variance)"
    assert str(Note.spanning(notes[:1])) == "a (adds 9 variance)"
    assert str(Note.spanning([Note("no reading"), Note("no reading")])) == "no reading"


def test_a_run_keeps_the_columns_in_words() -> None:
    """And what programs read of a row is no word among them."""
    row = next(
        row for row in ng.describe(ng.convert(Model(), "fp8-current")) if row.recipe != "none"
    )
    assert list(row.columns()) == [
        "name",
        "shape",
        "recipe",
        "output",
        "grad_input",
        "grad_weight",
        "backend",
        "sends",
        "note",
    ]
    assert set(map(type, row.columns().values())) == {str} and row.emulated


def test_a_gpu_that_emulates_is_told_when_a_model_is_converted(
    device_is: Callable[..., None],
) -> None:
    """Once for each reason, with the number of layers; not on a CPU, nor where the products are native."""
    device_is(Device("cuda", (8, 0), cuda=(12, 9)))
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False, device="meta") for _ in range(3)))
        for layer in model:
            layer.weight = nn.Parameter(torch.empty(32, 32, device="cuda"))
        with warns("convert.emulated", "recipe fp8-row", "8.9", "'0' and 2 more") as told:
            ng.convert(model, "fp8-row")
        assert len(told) == 3, "one for each product"
        assert all(row.emulated and "needs 8.9" in row.backend for row in ng.describe(model))
        ng.convert(model, "int8")
    assert not any(row.emulated for row in ng.describe(model))


def test_casts_that_no_kernel_is_made_for_are_told_too() -> None:
    """With no reason from any kernel, the row still has one."""
    recipe = ng.recipes.get("mxfp8")
    cast = dataclasses.replace(recipe.output.lhs, format=ng.formats.get("e3m2"))
    gemm = ng.Gemm(lhs=cast, rhs=cast)
    odd = dataclasses.replace(recipe, name="odd", output=gemm, grad_input=gemm, grad_weight=gemm)
    row = ng.describe(ng.convert(nn.Sequential(nn.Linear(32, 32)), odd))[0]
    assert row.emulated and row.backend.endswith("(no kernel is made for these operands)")


@pytest.mark.parametrize("gpu", [*OTHER_GPUS, "rocm"])
@pytest.mark.parametrize("recipe", ["fp8-current", "int8", "nvfp4"])
def test_a_gpu_without_kernels_is_told_once(gpu, recipe, monkeypatch, device_is) -> None:
    """AMD, Apple and Intel GPUs emulate every product, for one reason."""
    monkeypatch.setattr(torch.version, "hip", "6.4" if gpu == "rocm" else None)
    device_is(Device("cuda"))
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False, device="meta") for _ in range(3)))
        for layer in model:
            layer.weight = nn.Parameter(
                torch.empty(32, 32, device="cuda" if gpu == "rocm" else gpu)
            )
        reason = OTHER_GPUS.get(gpu, ROCM)
        with warns("convert.emulated", f"recipe {recipe}", reason, "'0' and 2 more") as told:
            ng.convert(model, recipe)
        assert len(told) == 1
        assert all(row.emulated and reason in row.backend for row in ng.describe(model))
