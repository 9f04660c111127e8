"""`narrowgauge export`: runs and folders of transformers, by the command line (exact)."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers

import narrowgauge as ng
from narrowgauge import cli
from narrowgauge.conversion import auto
from narrowgauge.errors import BusyError, ConfigError
from narrowgauge.lab import training
from narrowgauge.train.evaluation.saved import SavedRun
from narrowgauge.train.run_folder import RunFolder
from tests.compare import assert_same
from tests.raising import cli_raises
from tests.train import tiny


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of six steps with a checkpoint of each third one, and final/."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = tiny.settings(
        text, folder, recipe="fp8-delayed", checkpoint_every=3, keep=3, eval_every=3, hidden_size=64, intermediate_size=64
    )  # fmt: skip
    assert training.run(config) == 0
    return folder


def tensors(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_final_goes_out_with_the_runs_recipe_tokenizer_and_card(trained, tmp_path, capsys):
    before = sorted(path.relative_to(trained) for path in trained.rglob("*"))
    words = [
        str(trained),
        "--format",
        "fp8-channel",
        "--output",
        str(tmp_path / "out"),
        "--no-load",
    ]
    assert cli.main(["export", *words]) == 0
    assert " 14 of 14 " in capsys.readouterr().out
    facts = ng.export.verify(tmp_path / "out")
    assert facts["training"]["recipe"] == "fp8-delayed" and facts["training"]["steps"] == 6
    assert facts["training"]["loss"] in (tmp_path / "out/README.md").read_text()
    found, master = tensors(tmp_path / "out"), tensors(trained / "final")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("tile").input_ids
    for name in facts["narrow"]:
        wanted = ng.quantize(master[f"{name}.weight"].float(), ng.recipes.FP8_CURRENT.output.rhs)
        assert_same(found[f"{name}.weight"].view(torch.uint8), wanted.data.view(torch.uint8))
    assert sorted(path.relative_to(trained) for path in trained.rglob("*")) == before


@pytest.mark.slow  # trains a second run
def test_a_run_by_auto_goes_out_by_the_choices_that_it_recorded(text, tmp_path, monkeypatch):
    """An export has no batch, and measures nothing."""
    config = tiny.settings(text, tmp_path / "run", recipe="auto", steps=2)
    always = auto.Decision(recipe="int8", tokens=64, how="measured")
    with monkeypatch.context() as patch:
        patch.setattr(auto, "decide", lambda *_: always)
        assert training.run(config) == 0
    for source in (f"{tmp_path / 'run'}", f"{tmp_path / 'run'}@2"):
        words = ["--format", "fp8-channel", "--output", str(tmp_path / "out"), "--no-load"]
        assert cli.main(["export", source, *words, "--requantize"]) == 0
        assert ng.export.verify(tmp_path / "out")["training"]["recipe"] == "auto"
        shutil.rmtree(tmp_path / "out")


def test_a_checkpoint_goes_out_by_its_step(trained, tmp_path):
    for step in (3, 6):
        words = ["--format", "fp8-static", "--output", str(tmp_path / f"{step}"), "--no-load"]
        assert cli.main(["export", f"{trained}@{step}", *words]) == 0
    three, six = tensors(tmp_path / "3"), tensors(tmp_path / "6")
    name = "model.layers.0.mlp.down_proj"
    assert not torch.equal(three[f"{name}.weight"].float(), six[f"{name}.weight"].float())
    assert float(three[f"{name}.input_scale"]) > 0
    # The last checkpoint and final/ are the same weights.
    words = ["--format", "fp8-channel", "--output", str(tmp_path / "final"), "--no-load"]
    assert cli.main(["export", str(trained), *words]) == 0
    final = tensors(tmp_path / "final")
    for each in (f"{name}.weight", f"{name}.weight_scale"):
        assert_same(final[each].view(torch.uint8), six[each].view(torch.uint8))


def test_a_folder_of_transformers_goes_out_by_a_named_recipe(trained, tmp_path, capsys):
    words = [str(trained / "final"), "--format", "int8", "--output", str(tmp_path / "out")]
    cli_raises(["export", *words], ConfigError, "export.no-recipe", "--recipe")
    assert cli.main(["export", *words, "--recipe", "int8", "--no-load", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["narrow"]) == 14
    # What went out is no source: its numbers are codes already.
    words = [str(tmp_path / "out"), "--format", "bf16", "--output", str(tmp_path / "again")]
    cli_raises(["export", *words], ConfigError, "model.quantized", "compressed-tensors")


def test_wrong_sources_and_outputs_are_refused(trained, tmp_path):
    def refused(source, code, *more, error=ConfigError, output="out"):
        words = ["--format", "fp8-channel", "--output", str(tmp_path / output), *more]
        cli_raises(["export", str(source), *words], error, code)
        assert not (tmp_path / "out").exists()

    refused(tmp_path / "nowhere", "export.source")
    refused(tmp_path, "export.source")
    refused(trained, "export.recipe-of-run", "--recipe", "int8")
    refused(f"{trained}@4", "evaluate.checkpoints")
    cli_raises(
        ["export", str(trained), "--format", "fp8", "--output", str(tmp_path / "out")],
        ConfigError,
        "export.format",
        "fp8-block",
    )
    cli_raises(
        ["export", str(trained), "--format", "bf16", "--output", str(trained)],
        ConfigError,
        "export.output",
    )
    cli_raises(
        ["export", str(trained), "--format", "mxfp4", "--output", str(tmp_path / "out")],
        ConfigError,
        "export.no-layer",
        "fp8-channel",
        "--requantize",
    )
    with RunFolder.claim(trained, resume=True):
        refused(trained, "run.busy", error=BusyError)
    half = tmp_path / "half"
    shutil.copytree(trained / "final", half)
    data = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(half, "model.unloadable", "--recipe", "fp8-row")


def test_a_final_of_another_model_or_recipe_is_refused(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    words = ["export", str(run), "--format", "fp8-channel", "--output", str(tmp_path / "out")]
    known = json.loads((run / "run.json").read_text())
    narrow = next(row for row in known["describe"] if row["recipe"] == "fp8-delayed")
    narrow["recipe"] = "int8"
    (run / "run.json").write_text(json.dumps(known))
    cli_raises(words, ConfigError, "export.other-model", "int8", narrow["name"])
    small = transformers.LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    transformers.LlamaForCausalLM(small).save_pretrained(run / "final")
    shutil.copyfile(trained / "run.json", run / "run.json")
    cli_raises(words, ConfigError, "export.other-model", "layers.1")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shared(text, tmp_path_factory):
    """A run of three steps in nvfp4 whose global scales are powers of two, by the name of its recipe."""
    folder = tmp_path_factory.mktemp("shared") / "run"
    config = tiny.settings(
        text, folder, recipe="nvfp4+shared-scales", steps=3, hidden_size=64, intermediate_size=64
    )
    assert training.run(config) == 0
    return folder


def test_shared_scales_of_a_run_let_all_of_a_block_out(shared, tmp_path):
    """The first block has seven Linears in three groups; by nvfp4 alone q, k and v have scales of their own."""
    words = ["export", str(shared), "--format", "nvfp4", "--output", str(tmp_path / "out")]
    assert cli.main([*words, "--no-load"]) == 0
    facts = ng.export.verify(tmp_path / "out")
    assert set(facts["narrow"].values()) == {"nvfp4+shared-scales"}
    block = [name for name in facts["narrow"] if "layers.0." in name]
    assert len(block) == 7 and facts["bits"]["equal"] == len(facts["narrow"])
    plain = tmp_path / "plain"
    words = ["export", str(shared / "final"), "--recipe", "nvfp4", "--format", "nvfp4"]
    assert cli.main([*words, "--output", str(plain), "--no-load"]) == 0
    assert len(ng.export.verify(plain)["narrow"]) < len(facts["narrow"])  # control


@pytest.mark.parametrize("source", ["own", "a file"])
def test_a_calibration_takes_text_or_the_runs_own_data(shared, source, tmp_path, text):
    file = tmp_path / "text.txt"
    file.write_text("The scale of a tile rounds the amax. " * 30, encoding="utf-8")
    words = ["export", str(shared), "--format", "nvfp4-modelopt", "--output", str(tmp_path / "out")]
    given = source if source == "own" else str(file)
    assert cli.main([*words, "--calibrate", given, "--no-load"]) == 0
    found = tensors(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(shared / "final").eval()
    if source == "own":
        saved = SavedRun.open(shared, torch.device("cpu"))
        feed = saved.task.feed(model)
        ids = torch.cat([feed.draw(step).batches[0]["input_ids"] for step in range(3)])
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "final")
        every = tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
        longest = model.config.max_position_embeddings
        rows = min(32, len(every) // longest)
        ids = torch.tensor(every[: rows * longest]).reshape(rows, longest)
    # x of the first layer needs no product before it, so it is the wide model's.
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    name = "model.layers.0.self_attn.q_proj.input_scale"
    assert_same(found[name], (x.abs().amax().double() / (448 * 6)).float())
    seen = ng.export.verify(tmp_path / "out")["calibration"]
    assert (seen["rows"], seen["positions"]) == tuple(ids.shape) and seen["tokens"] == ids.numel()
    assert seen["sha256"] == hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert f"{ids.numel():,} tokens of {seen['source']}" in card
    assert ("own data" if source == "own" else str(file)) in seen["source"]


def test_calibrations_without_text_or_use_are_refused(shared, tmp_path):
    def refused(source, format, calibrate, *words):
        asked = ["--format", format, "--output", str(tmp_path / "out"), "--calibrate", calibrate]
        cli_raises(["export", str(source), *asked], ConfigError, "export.calibration", *words)
        assert not (tmp_path / "out").exists()

    refused(shared, "nvfp4", "own", "nvfp4-modelopt")
    refused(shared / "final", "nvfp4-modelopt", "own", "Name a file")
    refused(shared, "nvfp4-modelopt", "", "''")
    for content in ("a", "The scale of a tile rounds the amax. " * 5):
        (tmp_path / "short.txt").write_text(content, encoding="utf-8")
        refused(shared, "nvfp4-modelopt", str(tmp_path / "short.txt"))
