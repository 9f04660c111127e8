"""Runs that train adapters over codes: saved, resumed, merged, refused over another base (exact where not said).

All but the first test need the package peft.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge import convert
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.lab import training
from narrowgauge.memory.freezing import store_as_codes
from narrowgauge.train import adapter_state, loop
from narrowgauge.train.adapter import MergeReport
from narrowgauge.train.config.settings import resolved
from narrowgauge.train.evaluation.command import Asked, evaluate
from narrowgauge.train.evaluation.generation import GenerationOptions, generate
from narrowgauge.train.evaluation.saved import SavedRun
from narrowgauge.train.exporting import Options, exported
from narrowgauge.train.final_folder import export_merged
from narrowgauge.train.model import build
from narrowgauge.train.preparation import prepare
from tests.compare import assert_same
from tests.raising import raises
from tests.train import tiny

CPU = torch.device("cpu")


def test_without_peft_the_command_to_install_it_is_named(monkeypatch, make, base):
    monkeypatch.setattr(adapter_state, "find_spec", lambda name: None)
    with raises(ConfigError, "lora.no-peft"):
        loop.run(make(**settings(base)))


def test_several_ranks_are_refused(base, make, monkeypatch):
    monkeypatch.setattr(adapter_state, "find_spec", lambda name: name)
    config = make(**settings(base))
    adapter_state.refuse_run(config, 1)
    with raises(ConfigError, "lora.ranks"):
        adapter_state.refuse_run(config, 2)


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A model of two blocks, trained for a few steps."""
    config = tiny.settings(
        text, tmp_path_factory.mktemp("base") / "run", recipe="bf16", hidden_size=64,
        intermediate_size=128, steps=4, learning_rate=1e-2,
    )  # fmt: skip
    assert loop.run(config) == 0
    return Path(config.output) / "final"


def settings(base, lora="r=4", codes="fp8-block", **changes):
    found = {"model": str(base), "vocab_size": 4096, "lora": lora, "base": codes, "steps": 4}
    return found | {"warmup_steps": 1, "learning_rate": 5e-3} | changes


@pytest.fixture(scope="module")
def trained(base, text, tmp_path_factory):
    pytest.importorskip("peft")
    output = tmp_path_factory.mktemp("adapted") / "run"
    config = tiny.settings(
        text, output, **settings(base, checkpoint_every=2, keep=3, eval_every=2, best="loss")
    )
    assert training.run(config) == 0
    return config


def test_checkpoints_and_export_hold_the_adapter_alone(trained, base):
    folder = Path(trained.output)
    own = load_file(folder / "final" / "adapter_model.safetensors")
    assert len(own) == 28 and all(name.startswith("base_model.model.model.layers") for name in own)
    sizes = [each.stat().st_size for each in (folder / "checkpoints").rglob("weights-*")]
    assert 0 < max(sizes) < (base / "model.safetensors").stat().st_size / 4
    known = json.loads((folder / "final" / "base.json").read_text())
    assert known["model"] == str(base) and known["codes"] == "fp8-block"
    assert len(known["sha256"]) == 64


# peft 0.21 asks a model of transformers 5 by its former name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_the_adapter_and_computes_the_same(trained, base):
    """Exact: peft's own loader over the wide base, beside ours."""
    peft = pytest.importorskip("peft")
    from narrowgauge.train import adapter

    final = Path(trained.output) / "final"
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(final))
    ours = AutoModelForCausalLM.from_pretrained(base)
    plain = ours(torch.arange(8)[None]).logits
    adapter.load(ours, final)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        found = ours.eval()(ids).logits
        assert_same(found, theirs.eval()(ids).logits)
    assert not torch.equal(found, plain)  # control: the adapter is not empty


def test_a_resumed_run_is_equal_to_a_straight_one(trained):
    folder = Path(trained.output)
    copy = folder.with_name("resumed")
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    shutil.rmtree(copy / "final")
    assert training.run(replace(trained, output=str(copy), resume=True)) == 0
    assert tiny.digests(copy) == tiny.digests(folder)
    assert tiny.losses(copy) == tiny.losses(folder)
    one, other = (
        load_file(each / "final" / "adapter_model.safetensors") for each in (copy, folder)
    )
    for name, each in other.items():
        assert_same(one[name], each)


def test_a_run_is_evaluated_and_writes(trained):
    """The scores of the run's own evaluations, and texts of run and adapter folder."""
    folder = Path(trained.output)
    found = evaluate(folder, Asked(checkpoints="all"))
    logged = {event["step"]: event["loss"] for event in tiny.events(folder, "eval")}
    for row in found["checkpoints"]:
        assert row["narrow"]["validation"]["values"]["loss"] == logged[row["step"]]
    greedy = {"prompt": "the", "greedy": True, "max_new_tokens": 4, "device": "cpu"}
    assert generate(folder, GenerationOptions(checkpoint="best", **greedy))["recipe"] == "fp8-block"
    assert generate(folder / "final", GenerationOptions(**greedy))["tokens"] == 4


@pytest.fixture
def other_base(trained, base, tmp_path):
    """A copy of the run whose base has one other weight, and the copy of the base."""
    place, run = shutil.copytree(base, tmp_path / "base"), tmp_path / "run"
    shutil.copytree(trained.output, run)
    for name in ("config.toml", "final/base.json"):
        text = (run / name).read_text().replace(str(base), str(place))
        (run / name).write_text(text)
    tensors = load_file(place / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return run, replace(trained, model=str(place), output=str(run), resume=True, steps=5)


def test_an_adapter_of_another_base_is_refused_and_nothing_overwritten(other_base):
    run, config = other_base
    before = {path: path.read_bytes() for path in (run / "final").iterdir()}
    with raises(CheckpointError, "adapter.other-base"):
        training.run(config)
    with raises(CheckpointError, "adapter.other-base"):
        generate(run / "final", GenerationOptions(prompt="the", device="cpu"))
    for which in ("newest", "best"):
        with raises(CheckpointError, "evaluate.no-checkpoint") as caught:
            evaluate(run, Asked(checkpoints=which))
        assert "SHA-256" in str(caught.value)
    assert before == {path: path.read_bytes() for path in (run / "final").iterdir()}


@pytest.mark.parametrize("codes", ["fp8-block", "nvfp4", "nvfp4-46", "mxfp4", "int8", ""])
@pytest.mark.parametrize("lora", ["r=4", "r=4,dora"])
def test_a_merged_layer_is_a_fresh_cast_of_the_merged_weight(base, make, codes, lora):
    """Exact: codes of decoded weight plus the adapter's change, as a layer converted anew has them."""
    pytest.importorskip("peft")
    from narrowgauge.train import adapter

    wide = {} if codes else {"recipe": "none", "precision": "fp32"}
    config, task = prepare(resolved(make(**settings(base, lora, codes, **wide))))
    model = build(config, task.model, CPU, 64, None)
    generator = torch.Generator().manual_seed(1)
    for name, each in adapter_state.trained(model).items():
        if "lora_B" in name:
            each.data.normal_(0, 0.05, generator=generator)
    layer = model.model.layers[0].mlp.up_proj
    decoded = layer.base_layer.weight.detach().clone()
    # peft's own merge over the decoded weight: of DoRA with its magnitudes.
    alone = copy.deepcopy(layer)
    alone.merge()
    wide = alone.base_layer.weight.detach().clone()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model.eval()(ids).logits
    report = adapter.merge(model)
    assert report.layers == 14 and report.is_coded == bool(codes)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not torch.equal(wide, decoded)  # control
    merged = model.model.layers[0].mlp.up_proj
    if codes:
        fresh = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
        fresh[0].weight = torch.nn.Parameter(wide, requires_grad=False)
        convert(fresh, merged.recipe)
        store_as_codes(fresh[0])
        wide = fresh[0].weight.detach().clone()
    else:
        assert report.survives == 1.0
        with torch.no_grad():  # bounded: one product of float32 in the place of two
            assert (model(ids).logits - before).norm() < 1e-5 * before.norm()
    assert_same(merged.weight.detach().clone(), wide)


def test_a_change_below_half_a_step_does_not_survive(base, make):
    """The base's values lie on the grid of its codes, so a tiny adapter moves none of them."""
    pytest.importorskip("peft")
    from narrowgauge.train import adapter

    config, task = prepare(resolved(make(**settings(base))))
    survives = []
    for size in (1e-6, 0.1):
        model = build(config, task.model, CPU, 64, None)
        generator = torch.Generator().manual_seed(1)
        for name, each in adapter_state.trained(model).items():
            if "lora_B" in name:
                each.data.normal_(0, size, generator=generator)
        survives.append(adapter.merge(model).survives)
    assert survives[0] < 0.2 and survives[1] > 0.95


def test_merge_writes_a_folder_that_transformers_reads(trained):
    """Exact: its weights are what the merged codes decode to."""
    folder = Path(trained.output)
    saved = SavedRun.open(folder, CPU)
    [path] = saved.paths("newest")
    model, _, _ = saved.model(path)
    weights = {name: each.detach().clone() for name, each in adapter_state.trained(model).items()}
    words = export_merged(model, weights, saved.task.tokenizer, folder / "merged")
    assert "14" in words
    read, report = AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    assert not any(report.values()), report
    AutoTokenizer.from_pretrained(folder / "merged")
    own = dict(model.named_parameters())
    for name, each in read.named_parameters():
        assert_same(each.detach(), own[name].detach().clone())


def test_a_folder_of_an_adapter_is_no_model(trained, make):
    with raises(ConfigError, "model.adapter"):
        loop.run(make(model=str(Path(trained.output) / "final"), vocab_size=4096))


def test_targets_that_name_nothing_are_refused(base, make):
    pytest.importorskip("peft")
    with raises(ConfigError, "lora.targets"):
        loop.run(make(**settings(base, "targets=query")))


@pytest.mark.slow
def test_the_reference_trains_the_same_adapters_over_the_wide_base(base, make):
    pytest.importorskip("peft")
    config = make(**settings(base, compare="bf16"))
    assert training.run(config) == 0
    reference = Path(config.output) / "compare-bf16"
    known = json.loads((reference / "final" / "base.json").read_text())
    assert known["codes"] == "" and known["model"] == str(base)
    ours, theirs = tiny.losses(Path(config.output)), tiny.losses(reference)
    assert ours.keys() == theirs.keys() and ours != theirs
    # Bounded by what E4M3 moves the loss of a model of two blocks: far less than a tenth of a nat.
    assert all(abs(ours[step] - theirs[step]) < 0.1 for step in ours)


def test_an_export_of_adapters_names_the_merged_model(trained, tmp_path):
    """The run, its checkpoints and final/ hold adapters alone."""
    folder = Path(trained.output)

    def refused(source, *words):
        options = Options(format="bf16", output=tmp_path / "out", load=False)
        with raises(ConfigError, "export.adapter", *words):
            exported(str(source), options)

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("merged", "best"))
    refused(copy, "--resume", "--merge", copy / "merged", "--recipe fp8-block")
    refused(f"{copy}@2", copy / "merged")
    refused(copy / "final", "merged/")
    (copy / "merged").mkdir()
    refused(copy, f"Name {copy / 'merged'}")


@pytest.mark.parametrize(("survives", "advises"), [(0.4, True), (0.6, False)])
def test_a_merge_that_loses_most_of_the_change_says_what_to_do(survives, advises):
    report = MergeReport(
        layers=2, survives=survives, error=1.0, moved=0.9, lowest=("a", 0.1), is_coded=True
    )
    assert ("without --merge" in str(report)) == advises
