"""Freezing, checkpointing and narrow activations as settings of a run (exact)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.ops.registry import cpu_facts
from narrowgauge.optim import precision
from narrowgauge.train import loop
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import InvalidSettings
from narrowgauge.train.planning import command, policy
from narrowgauge.train.planning.counts import Counts
from tests.raising import raises
from tests.selection import quick
from tests.train import tiny


def finished(make, name, **changes):
    config = make(name, steps=2, **changes)
    assert loop.run(config) == 0
    return loop.Path(config.output)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["selective", "sqrt", "budget:3MiB"])
def test_checkpointing_changes_no_bit(make, chosen):
    plain = finished(make, "plain", recipe="fp8-delayed")
    again = finished(make, "again", recipe="fp8-delayed", checkpointing=chosen)
    assert tiny.losses(again) == tiny.losses(plain)
    assert tiny.digests(again) == tiny.digests(plain)


@pytest.mark.slow
def test_auto_takes_what_fits_and_says_why(make, monkeypatch):
    """By the count of the run's own step: of the memory that is there, and of a little less than each policy needs."""
    changes = {"recipe": "fp8-delayed", "checkpointing": "auto", "layers": 4, "batch_size": 32}
    config = make("auto", **changes)
    counts = Counts(cpu_facts())
    peaks = {
        each: counts.of(replace(config, checkpointing=each)).allocated for each in ("none", "full")
    }
    assert peaks["full"] < peaks["none"]
    notes = {}
    for name, limit in (("none", 2 * peaks["none"]), ("full", 1.03 * peaks["full"])):
        monkeypatch.setattr(policy, "available_bytes", lambda device, limit=limit: int(limit))
        run = finished(make, f"auto-{name}", **changes)
        notes[name] = json.loads((run / "run.json").read_text())["memory"]
        notes[name, "losses"] = tiny.losses(run)
    assert notes["none"][0].startswith(
        "checkpointing auto: none is the cheapest whose step fits into"
    )
    assert (
        "full is the cheapest" in notes["full"][0]
        and "3 of 4 blocks are computed again" in notes["full"][1]
    )
    assert notes["none", "losses"] == notes["full", "losses"]
    monkeypatch.setattr(policy, "available_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"no policy fits into .*; the least is [0-9,]+ bytes"):
        policy.settled(config, torch.device("cpu"))


@pytest.mark.slow
def test_a_plan_chooses_by_the_card(make):
    config = make("planned", recipe="fp8-current", checkpointing="auto", batch_size=4096)
    options = {"table": False, "full": False, "measure": False}
    found = command.answered(config, "", "2GiB", **options)
    note = next(each for each in found["notes"] if each.startswith("checkpointing auto"))
    chosen = note.split()[2]
    alone = command.answered(replace(config, checkpointing=chosen), "", "2GiB", **options)
    assert found["fits"] and found["allocated_bytes"] == alone["allocated_bytes"]


def test_a_plan_without_a_card_cannot_choose(make):
    options = {"table": False, "full": False, "measure": False}
    with raises(ConfigError, "plan.auto-checkpointing", "--card", "--memory"):
        command.answered(make("planned", checkpointing="auto"), "", "", **options)


def test_the_memory_of_a_machine(tmp_path, monkeypatch):
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    monkeypatch.setattr(policy, "MEMORY", meminfo)
    monkeypatch.setattr(policy, "GROUP", group)
    cpu = torch.device("cpu")
    with raises(ConfigError, "checkpointing.unknown-memory"):
        policy.available_bytes(cpu)
    meminfo.write_text("MemTotal: 200 kB\nMemAvailable:  100 kB\n")
    assert policy.available_bytes(cpu) == 102_400
    group.mkdir()
    for limit, expected in (("max", 102_400), ("60000", 50_000), ("9999999", 102_400)):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text("10000\n")
        assert policy.available_bytes(cpu) == expected


def test_frozen_layers_stay_and_have_no_optimizer_state(make, capsys):
    run = finished(
        make, "frozen", freeze="embed*,layers.0", compress_activations=True, checkpointing="full"
    )
    said = capsys.readouterr().err
    assert (
        "parameters train" in said
        and "stored as e4m3 1x128 pow2" in said
        and "computed again" in said
    )
    found, _ = store.newest_valid(run / "checkpoints")
    moments = [name for name in found.tensors["optimizer"] if name.endswith("exp_avg")]
    trainable = [
        name for name in found.tensors["weights"] if "embed" not in name and "layers.0." not in name
    ]
    assert len(moments) == len(trainable)
    start, _ = store.newest_valid(
        finished(make, "start", freeze="embed*,layers.0", learning_rate=1e-30) / "checkpoints"
    )
    still = {
        name
        for name, tensor in found.tensors["weights"].items()
        if torch.equal(tensor, start.tensors["weights"][name])
    }
    assert still == set(found.tensors["weights"]) - set(trainable)
    assert "memory" in (run / "run.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "settings",
    quick(
        [{"states": "8bit"}],
        [
            {"states": "fp32"},
            {"states": "8bit"},
            {"optimizer": "sgd", "states": "4bit", "precision": "bf16-o2"},
        ],
    ),
    ids=str,
)
def test_the_bytes_that_freezing_saves_are_those_of_the_states_chosen(make, capsys, settings):
    """Exact but for the three digits of the sentence: two runs' optimizers, with and without the frozen layers."""
    shape = {"hidden_size": 64, "intermediate_size": 128}
    name = "-".join(settings.values())

    def kept(run):
        found, _ = store.newest_valid(run / "checkpoints")
        return sum(tensor.nbytes for tensor in found.tensors["optimizer"].values())

    whole = kept(finished(make, f"whole-{name}", **shape, **settings))
    rest = kept(finished(make, f"frozen-{name}", freeze="embed*,layers.0", **shape, **settings))
    assert f"and {(whole - rest) / 2**20:.3g} MiB" in capsys.readouterr().err


@pytest.mark.slow
def test_fused_functions_keep_what_the_run_asks_for(make):
    """Exact: the losses of a run whose activations are recomputed; in FP8 the first loss is the same, and no later one."""
    import json

    exact = finished(make, "exact", recipe="fp8-delayed", fuse=True, save="exact", precision="fp32")
    again = finished(
        make,
        "again",
        recipe="fp8-delayed",
        fuse=True,
        save="exact",
        precision="fp32",
        checkpointing="full",
    )
    narrow = finished(make, "narrow", recipe="fp8-delayed", fuse=True, save="fp8", precision="fp32")
    assert tiny.losses(again) == tiny.losses(exact) and tiny.digests(again) == tiny.digests(exact)
    assert tiny.losses(narrow)[1] == tiny.losses(exact)[1]
    assert tiny.losses(narrow) != tiny.losses(exact)
    fused = json.loads((narrow / "run.json").read_text(encoding="utf-8"))["fused"]
    assert any("keeps its inputs as e4m3 1x128 pow2" in each for each in fused)
    assert any("codes" in each for each in fused)


def test_what_cannot_be_is_refused(make):
    with raises(InvalidSettings, "config.save", "recipe.fuse"):
        make(save="fp8")
    for settings in (
        {"save": "exact", "compile": True},
        {"save": "fp8", "compress_activations": True},
        {"compress_activations": True, "compile": True},
    ):
        first, second = settings
        with raises(InvalidSettings, f"config.{first}", second) as caught:
            make(fuse=True, **settings)
        assert [keys for keys, _ in caught.value.problems] == [(first, second)]
    with pytest.raises(
        InvalidSettings, match=r"memory.checkpointing = 'some': must be one of 'none'"
    ):
        make(checkpointing="some")
    with raises(ConfigError, "pattern.no-match", "freeze", "'embd'"):
        loop.run(make(freeze="embd"))


def test_a_run_that_would_fail_in_silence_is_refused_before_its_first_step(make, monkeypatch):
    """16-bit weights under torch's own AdamW: no precision of the ladder asks for it, and a changed one shall not."""
    bare = precision.Precision(name="bf16-o3", weights=torch.bfloat16)
    monkeypatch.setitem(precision.PRECISIONS, "bf16-o3", bare)
    config = make("bare", precision="bf16-o3", betas=(0.9, 0.999))
    with raises(ConfigError, "optim.unfit", "999"):
        loop.run(config)
    assert not list((loop.Path(config.output) / "checkpoints").glob("*"))
