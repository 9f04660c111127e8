"""Exports of tiny models: the forward's numbers in the files, what stays wide, refusals, and kills (exact).

Loading by transformers needs `accelerate` for fp8-block, and `compressed-tensors` for the other quantized formats. Both are in
the extra `dev`; without one, its tests are skipped with the package's name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec

import pytest
import safetensors.torch
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import CheckpointError, ConfigError, NumericsError
from narrowgauge.export import ExportReport, file_formats, layers, writing
from narrowgauge.memory import freeze
from tests.compare import assert_same
from tests.export.models import UNROTATED_MXFP4, bert, llama, mixtral, operands, qwen2
from tests.live_bytes import LiveBytes
from tests.raising import raises

# Format -> recipes whose codes it holds as they are.
HELD = [
    ("fp8-block", "fp8-block"),
    ("fp8-block-ct", "fp8-block"),
    ("fp8-channel", "fp8-row"),
    ("fp8-channel", "fp8-current"),
    ("fp8-channel", "fp8-delayed"),
    ("int8", "int8"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", UNROTATED_MXFP4),
    ("nvfp4", "nvfp4"),
]
MODELS = {"llama": llama, "qwen2": qwen2, "bert": bert}
# The others differ in biases, ties and names, which no format reads.
QUICK = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "bert"))]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def name_of(recipe):
    return recipe if isinstance(recipe, str) else recipe.name


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def decoded(found, name):
    """[N, K] float32 of a layer, written apart from the package's readers."""
    packed = found.get(f"{name}.weight_packed")
    if packed is not None:
        weight = torch.empty(packed.shape[0], 2 * packed.shape[1])
        weight[:, 0::2], weight[:, 1::2] = E2M1[(packed % 16).long()], E2M1[(packed // 16).long()]
    else:
        weight = found[f"{name}.weight"].float()
    scale = found.get(f"{name}.weight_scale", found.get(f"{name}.weight_scale_inv"))
    if scale.dtype == torch.uint8:
        scale = 2.0 ** (scale.float() - 127)
    whole = found.get(f"{name}.weight_global_scale")
    scale = scale.float() if whole is None else scale.float() * (1 / whole)
    rows, columns = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    return weight * torch.kron(scale, torch.ones(rows, columns))


def needs(form):
    package = {"fp8-block": "accelerate", "bf16": "torch"}.get(form, "compressed_tensors")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed, which transformers needs to load {form}")


@pytest.mark.parametrize("model", QUICK)
@pytest.mark.parametrize(("form", "recipe"), HELD, ids=lambda each: name_of(each))
def test_files_hold_the_numbers_by_which_the_forward_pass_multiplies(form, recipe, model, tmp_path):
    made = MODELS[model]()
    ng.convert(made, recipe)
    report = ng.export.save(made, tmp_path / "out", format=form, load=False, fused=False)
    expected, found = operands(made), tensors_of(tmp_path / "out")
    assert report.narrow and set(report.narrow) == {
        name for name in expected if name not in report.wide
    }
    for name in report.narrow:
        here, wanted = decoded(found, name), expected[name]
        if form == "nvfp4":  # the reader inverts the global scale, and rounds its product
            torch.testing.assert_close(here, wanted, rtol=2**-22, atol=0)
        else:
            assert_same(here, wanted, at=name)
    bits = report.facts["bits"]
    assert bits["layers"] == len(report.narrow) and bits["requantized"] == {}
    assert bits["equal"] == bits["layers"] or form == "nvfp4"


@pytest.mark.parametrize("model", QUICK)
@pytest.mark.parametrize(
    ("form", "recipe"), [("bf16", "fp8-current"), *HELD], ids=lambda each: name_of(each)
)
def test_transformers_reads_the_same_weights(form, recipe, model, tmp_path):
    needs(form)
    made = MODELS[model]()
    ng.convert(made, recipe)
    report = ng.export.save(made, tmp_path / "out", format=form, fused=False)
    loading = report.facts["loading"]
    assert loading["checked"] and loading["weights"] == len(report.narrow)
    # transformers multiplies NVFP4's scales in bfloat16.
    assert loading["equal_elements"] > 0.98 if form == "nvfp4" else loading["equal_elements"] == 1
    assert 0 < loading["logits"]["loaded"] < 0.5


def test_a_frozen_base_goes_out_in_the_codes_as_which_it_was_frozen(tmp_path):
    made = llama()
    ng.convert(made, "fp8-block")
    freeze(made, "layers.*", codes=True)
    expected = operands(made)
    report = ng.export.save(made, tmp_path / "out", format="fp8-block", load=False)
    found = tensors_of(tmp_path / "out")
    assert len(report.narrow) == 7
    for name in report.narrow:
        assert_same(decoded(found, name), expected[name], at=name)
    # Another format than that of the codes holds none of them.
    with raises(ConfigError, "export.no-layer"):
        ng.export.save(made, tmp_path / "other", format="int8", load=False)
    # As bf16 the codes are decoded, here without a rounding: powers of two times E4M3.
    ng.export.save(made, tmp_path / "wide", format="bf16", load=False)
    wide = tensors_of(tmp_path / "wide")
    for name in report.narrow:
        assert_same(wide[f"{name}.weight"].float(), expected[name], at=name)


def test_weights_that_are_stored_otherwise_go_out_in_16_bits(tmp_path):
    """GPT-2's, of which no reader of codes knows that they are transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=2
    )
    made = ng.convert(GPT2LMHeadModel(sizes), "fp8-current")
    choices = layers.chosen(made, file_formats.get("fp8-channel"), requantize=True)
    assert choices["transformer.h.0.attn.c_attn"].reason.code == "stored-otherwise"
    with raises(ConfigError, "export.no-layer", "transposed"):
        ng.export.save(made, tmp_path / "codes", format="fp8-channel", load=False)
    ng.export.save(made, tmp_path / "wide", format="bf16", load=False)
    found = tensors_of(tmp_path / "wide")["transformer.h.0.attn.c_attn.weight"]
    assert_same(found, made.transformer.h[0].attn.c_attn.weight.detach().bfloat16())


def test_static_scales_of_x_come_from_the_amax_history(tmp_path):
    made = llama()
    ng.convert(made, "fp8-delayed")
    with raises(ConfigError, "export.no-layer"):  # nothing was recorded yet
        ng.export.save(made, tmp_path / "out", format="fp8-static", load=False)
    ids = torch.arange(24).reshape(2, 12)
    made.train()(ids, labels=ids).loss.backward()
    ng.advance(made)
    report = ng.export.save(made, tmp_path / "out", format="fp8-static", load=False)
    found = tensors_of(tmp_path / "out")
    for name in report.narrow:
        recorded = made.get_submodule(name).scaling["x"].history.max()
        assert_same(found[f"{name}.input_scale"], (recorded.double() / 448).float().reshape(1))


@pytest.mark.skipif(not find_spec("compressed_tensors"), reason="needs compressed-tensors")
def test_transformers_loads_static_scales_of_x(tmp_path):
    """A decoded model has no place for the scales of x, so a load without that place is whole."""
    made = ng.convert(llama(), "fp8-delayed")
    ids = torch.arange(24).reshape(2, 12)
    made.train()(ids, labels=ids).loss.backward()
    ng.advance(made)
    report = ng.export.save(made, tmp_path / "out", format="fp8-static")
    assert report.facts["loading"]["equal"] == len(report.narrow) == 7


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_a_wide_weight_that_is_not_finite_is_refused(tmp_path, format):
    made = ng.convert(llama(), "int8")
    with torch.no_grad():
        made.lm_head.weight[0, 0] = 1e30
    with raises(NumericsError, "weights.not-finite"):  # infinite in float16 alone
        ng.export.save(made, tmp_path / "out", format=format, load=False, dtype=torch.float16)
    with torch.no_grad():
        made.lm_head.weight[0, 0] = float("nan")
    with raises(NumericsError, "weights.not-finite"):
        ng.export.save(made, tmp_path / "out", format=format, load=False)
    assert not list(tmp_path.iterdir())


def test_arguments_are_refused_before_anything_is_written(tmp_path):
    made = ng.convert(llama(), "int8")
    for code, wrong in (
        ("export.dtype", {"dtype": "bfloat16"}),
        ("export.dtype", {"dtype": torch.int8}),
        ("export.tokenizer", {"tokenizer": object()}),
        ("export.tokenizer", {"tokenizer": str(tmp_path / "nowhere")}),
    ):
        with raises(ConfigError, code):
            ng.export.save(made, tmp_path / "out", format="int8", load=False, **wrong)
    with ng.suspended(made), raises(ConfigError, "export.no-layer", "suspended(model)"):
        ng.export.save(made, tmp_path / "out", format="int8", load=False)
    assert not list(tmp_path.iterdir())


def test_training_goes_on_as_if_nothing_had_been_exported(tmp_path):
    """The export reads a model in training mode: state, mode and the next step stay the same."""
    ids = torch.arange(24).reshape(2, 12)

    def losses(exports):
        made = llama().train()
        ng.convert(made, "fp8-delayed")
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = made(ids, labels=ids).loss
            loss.backward()
            if exports:
                ng.export.save(
                    made, tmp_path / "out", format="fp8-channel", load=False, overwrite=True
                )
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(made)
            found.append(loss.detach())
        assert all(module.training for module in made.modules())
        return found, made.state_dict()

    assert_same(losses(True), losses(False))


# --- what stays wide -----------------------------------------------------------------------------


def test_heads_ties_biases_and_other_precisions_stay_wide_and_are_listed(tmp_path):
    made = qwen2(num_hidden_layers=2)
    ng.convert(made, {"*": "fp8-row", "layers.1.*": "int8", "lm_head": "fp8-row"})
    report = ng.export.save(made, tmp_path / "out", format="fp8-channel", load=False)
    assert report.wide["lm_head"].code == "tied"
    assert report.wide["model.layers.1.mlp.down_proj"].code == "other-element"
    found = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in found  # once, under the embedding's name
    assert found["model.layers.0.self_attn.q_proj.bias"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) == set(report.wide)
    assert config["tie_word_embeddings"] and config["dtype"] == "bfloat16"


def test_ragged_blocks_stay_wide_with_all_that_servers_fuse_with_them(tmp_path):
    made = llama(num_key_value_heads=1, intermediate_size=192)  # k and v [64, 128], down [128, 192]
    ng.convert(made, "fp8-block")
    report = ng.export.save(made, tmp_path / "out", format="fp8-block", load=False)
    assert report.narrow == ["model.layers.0.self_attn.o_proj"]
    assert report.wide["model.layers.0.self_attn.k_proj"].code == "ragged"
    assert report.wide["model.layers.0.self_attn.q_proj"].code == "fused"
    assert "64x128" in report.wide["model.layers.0.self_attn.q_proj"]
    alone = ng.export.save(made, tmp_path / "alone", format="fp8-block", load=False, fused=False)
    assert "model.layers.0.self_attn.q_proj" in alone.narrow


def test_global_scales_of_a_fused_group_must_be_equal(tmp_path):
    made = llama()
    ng.convert(made, "nvfp4")
    report = ng.export.save(made, tmp_path / "out", format="nvfp4", load=False)
    assert sorted(name.rpartition(".")[2] for name in report.narrow) == ["down_proj", "o_proj"]
    assert report.wide["model.layers.0.self_attn.k_proj"].code == "global-scales"
    with torch.no_grad():  # equal amaxes give equal global scales
        for name in ("q_proj", "k_proj", "v_proj"):
            made.get_submodule(f"model.layers.0.self_attn.{name}").weight[0, 0] = 1.0
    report = ng.export.save(made, tmp_path / "equal", format="nvfp4", load=False)
    assert len(report.narrow) == 5


def test_power_of_two_global_scales_are_rescaled_exactly(tmp_path):
    made = llama()
    ng.convert(made, "nvfp4")
    attention = made.model.layers[0].self_attn
    with torch.no_grad():
        for name, amax in (("q_proj", 448 * 6 * 2.0**-12), ("k_proj", 448 * 6 * 2.0**-13)):
            getattr(attention, name).weight[0, 0] = amax
        attention.v_proj.weight[0, 0] = 448 * 6 * 2.0**-12
    report = ng.export.save(made, tmp_path / "out", format="nvfp4", load=False)
    found, expected = tensors_of(tmp_path / "out"), operands(made)
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    assert set(names) <= set(report.narrow)
    assert {float(found[f"{name}.weight_global_scale"]) for name in names} == {2.0**12}
    for name in names:
        assert_same(decoded(found, name), expected[name], at=name)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-46"])
def test_shared_scales_let_all_of_nvfp4_out(recipe, tmp_path):
    """Trained a step; all seven Linears go out, each group under one scale, with the forward's numbers."""
    ids = torch.arange(24).reshape(2, 12)
    made = llama().train()
    ng.convert(made, recipe, share_scales=True)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(ids, labels=ids).loss.backward()
    optimizer.step()
    ng.advance(made)
    report = ng.export.save(made, tmp_path / "out", format="nvfp4", load=False)
    found, expected = tensors_of(tmp_path / "out"), operands(made)
    assert len(report.narrow) == 7 == report.facts["bits"]["equal"]
    for group in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):  # fmt: skip
        names = [f"model.layers.0.{name}" for name in group]
        assert len({float(found[f"{name}.weight_global_scale"]) for name in names}) == 1
    for name in report.narrow:
        assert_same(decoded(found, name), expected[name], at=name)


@pytest.mark.parametrize("calibrates", [False, True])
def test_modelopts_nvfp4_comes_back_to_the_bit_and_calibrates_x_on_request(calibrates, tmp_path):
    """Its second scale multiplies, so a float32 needs no inversion."""
    made = ng.convert(llama(), "nvfp4", share_scales=True)
    ids = torch.arange(24).reshape(2, 12)
    seen = {}
    for name, layer in made.named_modules():
        if isinstance(layer, ng.QLinear):
            layer.register_forward_pre_hook(
                lambda _, given, name=name: seen.__setitem__(name, given[0].abs().amax())
            )
    given = {"calibration": ids} if calibrates else {}
    made.train()
    report = ng.export.save(made, tmp_path / "out", format="nvfp4-modelopt", **given)
    assert made.training and len(report.narrow) == 7 == report.facts["bits"]["equal"]
    assert not report.facts["loading"]["checked"]  # transformers has no reader of it
    expected, found = operands(made), tensors_of(tmp_path / "out")
    for name in report.narrow:
        packed, scale = found[f"{name}.weight"], found[f"{name}.weight_scale"].float()
        weight = E2M1[torch.stack((packed % 16, packed // 16), -1).flatten(1).long()]
        scale = scale * found[f"{name}.weight_scale_2"]
        assert_same(weight * scale.repeat_interleave(16, 1), expected[name], at=name)
        if calibrates:  # E4M3's largest number times E2M1's
            assert_same(found[f"{name}.input_scale"], (seen[name].double() / 2688).float())
    assert (f"{name}.input_scale" in found) == calibrates
    seen = report.facts["calibration"]
    assert (seen is not None) == calibrates == ("24 tokens, in 2 rows of 12" in str(report))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    other = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    algo = "NVFP4" if calibrates else "W4A16_NVFP4"
    assert config["quant_algo"] == other["quant_algo"] == algo
    assert config["ignore"] == other["exclude_modules"] == ["lm_head"]
    for name in report.narrow:  # what vLLM asks of layers that it fuses
        if name.endswith(("k_proj", "v_proj")):
            first = f"{name.rpartition('.')[0]}.q_proj"
            assert_same(found[f"{name}.weight_scale_2"], found[f"{first}.weight_scale_2"])


def test_calibration_is_of_one_format(tmp_path):
    made = ng.convert(llama(), "nvfp4")
    with raises(ConfigError, "export.calibration"):
        ng.export.save(made, tmp_path / "out", format="nvfp4", calibration=torch.ones(1, 4))
    zero = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        made.model.norm.weight.zero_()
        made.model.layers[0].post_attention_layernorm.weight.zero_()
    with raises(ConfigError, "export.calibration", "mlp"):
        ng.export.save(
            made, tmp_path / "out", format="nvfp4-modelopt", calibration=zero, fused=False
        )


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[96]]), "96"),
        (torch.tensor([[-1, 5]]), "-1"),
        (torch.ones(1, 4), "float32"),
        (torch.ones(4, dtype=torch.long), "[4]"),
        (torch.ones(0, 4, dtype=torch.long), "[0, 4]"),
        ([[1, 2]], "list"),
    ],
)
def test_calibration_takes_token_ids_of_the_model_alone(ids, words, tmp_path):
    made = ng.convert(llama(), "nvfp4", share_scales=True)
    with raises(ConfigError, "export.calibration", words):
        ng.export.save(made, tmp_path / "out", format="nvfp4-modelopt", calibration=ids)
    assert not (tmp_path / "out").exists()


def test_a_global_scale_is_rescaled_exactly_or_not_at_all():
    cast = recipes.NVFP4.output.rhs
    x = torch.zeros(16, 32)
    x[:, :16], x[0, 16] = 2.0**-16, 448 * 6 * 2.0**-12  # tiles' scales 448 and far below
    q = ng.quantize(x, cast)
    assert float(q.global_scale) == 2.0**-12
    found = layers.rescaled(q, 2.0**-10)
    assert found is None or torch.equal(ng.dequantize(found), ng.dequantize(q))
    assert layers.rescaled(q, 3 * 2.0**-12) is None
    assert layers.rescaled(q, 2.0**-2) is None  # the small tile's scale would be zero


EXPERTS = "model.layers.0.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("form", "recipe"), [("fp8-channel", "fp8-row"), ("fp8-channel", "fp8-current"), ("fp8-block", "fp8-block")]
)  # fmt: skip
def test_experts_go_out_one_by_one_under_the_names_of_checkpoints(form, recipe, tmp_path):
    made = mixtral()
    ng.convert(made, recipe)
    ng.export.save(made, tmp_path / "out", format=form, load=False)
    found, expected = tensors_of(tmp_path / "out"), operands(made)
    for expert in range(4):
        inner = f"model.layers.0.mlp.experts.{expert}"
        gate_up = [decoded(found, f"{EXPERTS}.{expert}.{name}") for name in ("w1", "w3")]
        assert_same(torch.cat(gate_up), expected[f"{inner}.gate_up_proj"], at=inner)
        assert_same(decoded(found, f"{EXPERTS}.{expert}.w2"), expected[f"{inner}.down_proj"])
    needs(form)
    loading = ng.export.save(made, tmp_path / "b", format=form).facts["loading"]
    assert loading["equal"] == loading["weights"] == 12


def test_experts_that_readers_do_not_take_stay_wide_and_are_ignored(tmp_path):
    made = mixtral(intermediate_size=192)  # gate and up of 192 rows: no whole blocks
    ng.convert(made, "fp8-block")
    report = ng.export.save(made, tmp_path / "ragged", format="fp8-block", load=False)
    assert report.wide["model.layers.0.mlp.experts.down_proj"].code == "ragged"
    config = json.loads((tmp_path / "ragged/config.json").read_text())
    assert f"{EXPERTS}.3.w2" in config["quantization_config"]["modules_to_not_convert"]
    assert tensors_of(tmp_path / "ragged")[f"{EXPERTS}.3.w2.weight"].dtype == torch.bfloat16
    made = mixtral()
    ng.convert(made, "int8")
    report = ng.export.save(made, tmp_path / "out", format="int8", load=False)
    assert report.wide["model.layers.0.mlp.experts.gate_up_proj"].code == "experts"
    assert {name.rpartition(".")[2] for name in report.narrow} == {"q_proj", "k_proj", "v_proj", "o_proj"}  # fmt: skip
    needs("int8")
    with raises(ConfigError, "export.unreadable", "--no-load"):
        ng.export.save(made, tmp_path / "b", format="int8")
    assert not (tmp_path / "b").exists()


# --- formats that would change the numbers -------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "recipe", "code"),
    [
        ("mxfp4", "mxfp4", "rotated"),
        ("int8", "int4-lsq-luq", "learned-step"),
        ("fp8-channel", "fp8-block", "other-tile"),
        ("nvfp4", "mxfp8", "other-element"),
    ],
)
def test_a_format_that_changes_the_numbers_says_by_how_much(form, recipe, code, tmp_path):
    made = llama(hidden_size=256, num_attention_heads=2)
    ng.convert(made, recipe)
    expected = operands(made)
    choices = layers.chosen(made, file_formats.get(form))
    assert choices["model.layers.0.mlp.up_proj"].reason.code == code
    with raises(ConfigError, "export.no-layer", "--requantize") as error:
        ng.export.save(made, tmp_path / "out", format=form, load=False)
    assert not (tmp_path / "out").exists()
    report = ng.export.save(made, tmp_path / "out", format=form, load=False, requantize=True, fused=False)  # fmt: skip
    changes, found = report.facts["bits"]["requantized"], tensors_of(tmp_path / "out")
    assert set(changes) == set(report.narrow)
    for name, change in changes.items():
        wanted = expected[name]
        if recipe == "mxfp4":
            from narrowgauge.ops.hadamard import unrotate

            wanted = unrotate(wanted, recipes.MXFP4.output.rotate, wanted.shape[1])
        assert change == pytest.approx(float((decoded(found, name) - wanted).norm() / wanted.norm()), rel=1e-4)  # fmt: skip
        assert 0 <= change < 0.3
    largest = max(changes.values())
    assert f"{largest:.2g}" in str(error.value)
    assert f"{largest:.2g}" in (tmp_path / "out/README.md").read_text()


def test_a_stochastic_cast_is_refused():
    rhs = replace(recipes.MXFP8.output.rhs, rounding="stochastic")
    assert file_formats.MXFP8.holds(rhs, 128, 128).code == "stochastic"


# --- refusals: nothing is written, nothing is lost -----------------------------------------------


def test_bad_input_is_a_sentence_and_leaves_everything_as_it_was(tmp_path):
    made = llama()
    with raises(ConfigError, "export.no-codes"):
        ng.export.save(made, tmp_path / "out", format="fp8-channel")
    ng.convert(made, "fp8-row")
    with raises(ConfigError, "export.format", "fp8-channel"):
        ng.export.save(made, tmp_path / "out", format="fp8-chanel")
    with raises(ConfigError, "export.no-config"):
        ng.export.save(torch.nn.Linear(16, 16), tmp_path / "out", format="bf16")
    with raises(ConfigError, "export.no-numbers", "embed_tokens"):
        ng.export.save(llama().to("meta"), tmp_path / "out", format="bf16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with raises(ConfigError, "export.output"):
            ng.export.save(made, tmp_path / name, format="fp8-channel", overwrite=True)
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
    with raises(NumericsError, "weights.not-finite"):
        ng.export.save(made, tmp_path / "out", format="fp8-channel")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert (tmp_path / "full/mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_an_older_export_is_replaced_on_request_alone(tmp_path):
    made = llama()
    ng.convert(made, "fp8-row")
    first = ng.export.save(made, tmp_path / "out", format="fp8-channel", load=False)
    with raises(ConfigError, "export.output", "--overwrite"):
        ng.export.save(made, tmp_path / "out", format="bf16", load=False)
    assert ng.export.verify(tmp_path / "out")["format"] == "fp8-channel"
    ng.export.save(made, tmp_path / "out", format="bf16", load=False, overwrite=True)
    assert ng.export.verify(tmp_path / "out")["format"] == "bf16"
    (tmp_path / "out/notes.txt").write_text("mine")  # would go with the older export
    with raises(ConfigError, "export.output", "notes.txt"):
        ng.export.save(made, tmp_path / "out", format="bf16", load=False, overwrite=True)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert isinstance(first, ExportReport)
    # llama() has one layer of seven Linears. The path before the colon may hold any digits.
    line = str(first).splitlines()[0].removeprefix(f"{tmp_path / 'out'}: ")
    assert line.startswith("fp8-channel, 7 Linears as codes, ")


def test_a_changed_or_cut_file_is_noticed(tmp_path):
    made = llama()
    ng.convert(made, "int8")
    ng.export.save(made, tmp_path / "out", format="int8", load=False)
    file = tmp_path / "out/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with raises(CheckpointError, "export.damaged"):
        ng.export.verify(tmp_path / "out")
    (tmp_path / "out/export.json").unlink()
    with raises(CheckpointError, "file.unreadable"):
        ng.export.verify(tmp_path / "out")
    # Without export.json it is no export of ours, so nothing replaces it.
    with raises(ConfigError, "export.output"):
        ng.export.save(made, tmp_path / "out", format="int8", load=False, overwrite=True)


def test_weights_that_changed_while_they_were_written_are_refused(tmp_path, monkeypatch):
    made = llama()
    ng.convert(made, "fp8-row")
    write = writing.write_weights

    def meanwhile(model, *rest):
        write(model, *rest)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)

    monkeypatch.setattr(writing, "write_weights", meanwhile)
    with raises(ConfigError, "export.changed", "up_proj"):
        ng.export.save(made, tmp_path / "out", format="fp8-channel", load=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_compiled_model_goes_out_as_the_module_inside(tmp_path):
    made = llama()
    ng.convert(made, "fp8-row")
    report = ng.export.save(torch.compile(made), tmp_path / "out", format="bf16")
    assert report.facts["model"] == "LlamaForCausalLM" and report.facts["loading"]["checked"]


def test_an_adapter_must_be_merged_first(tmp_path):
    made = llama()
    made.model.layers[0].mlp.up_proj.register_module("lora_A", torch.nn.Linear(8, 8))
    with raises(ConfigError, "export.adapter", "merge_and_unload"):
        ng.export.save(made, tmp_path / "out", format="bf16")


# --- files ---------------------------------------------------------------------------------------


def test_shards_have_an_index_and_load_as_one_file(tmp_path):
    made = llama(num_hidden_layers=2)
    ng.convert(made, "fp8-block")
    ng.export.save(made, tmp_path / "one", format="fp8-block", load=False)
    report = ng.export.save(made, tmp_path / "many", format="fp8-block", shard_bytes=2**17)
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert_same(dict(sorted(many.items())), dict(sorted(one.items())))
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one) and set(index["weight_map"].values()) == set(files)
    assert ng.export.verify(tmp_path / "many")["files"].keys() >= set(files)
    if find_spec("accelerate") is not None:
        assert report.facts["loading"]["equal"] == 14


@pytest.mark.parametrize(("form", "recipe"), [("fp8-channel", "fp8-row"), ("bf16", "fp8-row")])
def test_memory_is_that_of_the_model_a_shard_and_a_layer(form, recipe, tmp_path):
    """Bounded: operations on a weight also return views of the model's own memory."""
    made = ng.convert(llama(num_hidden_layers=12, vocab_size=32), recipe)
    model = sum(each.nbytes for each in made.parameters())
    shard, casts = 150_000, 6 * 4 * 128 * 256  # six float32 copies of the largest weight
    with LiveBytes() as live:
        report = ng.export.save(made, tmp_path / "out", format=form, load=False, shard_bytes=shard)
    whole = sum(each["bytes"] for each in report.facts["files"].values())
    assert live.peak < model + shard + casts < model + whole
    assert live.peak > 0.9 * model  # control: the count sees the model


def test_the_card_says_what_was_done_and_how_to_load_it(tmp_path):
    made = llama()
    ng.convert(made, "fp8-row")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/tokenizer.json").write_text("{}")
    (tmp_path / "tokens/private.txt").write_text("mine")
    facts = {"recipe": "fp8-row", "loss": "2.5 at step 10", "verdict": ""}
    report = ng.export.save(
        made, tmp_path / "out", format="fp8-channel", load=False, tokenizer=tmp_path / "tokens", facts=facts
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*report.facts["files"], "export.json"}
    assert names == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md", "export.json",
    }  # fmt: skip
    text = (tmp_path / "out/README.md").read_text()
    for words in (
        "2.5 at step 10",
        "vllm serve",
        "sglang",
        "lm_head",
        report.facts["loading"]["why"],
    ):
        assert words in text
    assert "verdict" not in text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_leaves_the_old_export_or_the_new_one(tmp_path):
    made = llama()
    ng.convert(made, "fp8-row")
    out = tmp_path / "out"
    ng.export.save(made, out, format="bf16", load=False)
    shutil.copytree(out, tmp_path / "kept")
    found = []
    for point in range(1, 60):
        if (child := os.fork()) == 0:
            _die_at(point)
            ng.export.save(made, out, format="fp8-channel", load=False, overwrite=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        # Between the two renames the name is free, and the next export gives the old one back.
        if out.exists():
            found.append(ng.export.verify(out)["format"])
        else:
            found.append("none")
            assert ng.export.verify(tmp_path / ".old-out")["format"] == "bf16"
        if found[-1] == "none" or point in (4, 8):
            ng.export.save(made, out, format="bf16", load=False, overwrite=True)
            assert {path.name for path in tmp_path.iterdir()} == {"kept", "out"}
        # The same state for the next point: leftovers would add calls to it.
        for path in (*tmp_path.glob(".*-out"), out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", out)
    assert len(found) > 15 and {"bf16", "none", "fp8-channel"} == set(found)
    assert ng.export.verify(out)["format"] == "fp8-channel"
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "out"}


def _die_at(point):
    """Kill this process before its n-th call of fsync, rename, mkdir, or rmdir."""
    left = [point]

    def counted(call):
        def instead(*given, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return instead

    for name in ("fsync", "rename", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
