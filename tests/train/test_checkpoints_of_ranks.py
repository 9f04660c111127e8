"""Checkpoints of `narrowgauge train` on several ranks, each of which writes its part: they promise what one process's do (exact).

Faults are those of `faulty_run`; most runs are in the processes of `ranks`, the chain over numbers of ranks under torchrun itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge.train import exporting, loop, one_run, run_checkpoints
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import replace
from tests.processes import PYTHON, run
from tests.selection import quick
from tests.train import faulty_run, tiny
from tests.train.tasks import folders
from tests.train.test_torchrun import PROGRAM, same_run, trained


def saved(config: Any) -> Path:
    return Path(config.output) / "checkpoints"


def shards_of(folder: Path) -> list[str]:
    return sorted(re.match(r"rank-\d+", path.name)[0] for path in folder.glob("rank-*"))  # type: ignore[index]


def assert_all_end(said: list[Any], words: str) -> None:
    """With one error, which one rank tells; the store of these processes may let both."""
    assert any(re.match(words, each) for each in said), said
    assert all(re.match(f"{words}|EndedElsewhere", each) for each in said), said


# --- what a run writes, and what it goes on from


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick(["fsdp"], ["dp", "fsdp"]))
def test_a_full_disk_on_one_rank_ends_all_and_loses_nothing(ranks, make, layout):
    """The file system refuses on rank 1 as it saves step 4."""
    common = {"recipe": "fp8-delayed", "steps": 5}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("full", parallel=layout, checkpoint_every=2, **common)
    said = ranks(2)(trained, config, [("full", 1, 3)])
    assert_all_end(
        said, r"StorageError: rank 1: cannot save a checkpoint in .*step-00000004: File too large"
    )
    assert os.listdir(saved(config)) == ["step-00000002"]  # and no draft
    assert shards_of(saved(config) / "step-00000002") == ["rank-00000", "rank-00001"]
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    assert [event["step"] for event in tiny.events(Path(config.output), "resume")] == [2]
    same_run(Path(config.output), Path(reference.output))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def told(config: Any) -> tuple[Any, list[str]]:
    """The exit code, and what this rank has to say of checkpoints, which rank 0 alone prints."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "tell", said.append)
        return trained(config), said


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["changed", "missing", "foreign", "no manifest"])
def test_damaged_shards_are_named_and_all_ranks_take_the_checkpoint_before(ranks, make, harm):
    common = {"recipe": "fp8-delayed", "steps": 6}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("harmed", parallel="fsdp", checkpoint_every=2, keep=3, **common)
    assert ranks(2)(trained, config) == [0, 0]
    last, before = (saved(config) / f"step-0000000{step}" for step in (6, 4))
    shard = last / "rank-00001-0.safetensors"
    if harm == "changed":
        damage(shard)
    elif harm == "missing":
        shard.unlink()
    elif harm == "no manifest":
        (last / "manifest.json").unlink()
    else:
        shard.write_bytes((before / shard.name).read_bytes())
    (code, [warned]), second = ranks(2)(told, replace(config, resume=True))
    assert code == 0 and second == (0, [warned])
    words = {
        "changed": "was changed",
        "missing": "foreign files",
        "foreign": "of step 4",
        "no manifest": "manifest.json",
    }[harm]
    assert warned.startswith("WARNING: ") and words in warned
    assert harm == "no manifest" or shard.name in warned
    [resumed] = tiny.events(Path(config.output), "resume")
    assert (resumed["step"], resumed["skipped"]) == (4, ["step-00000006"])
    same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
def test_a_checkpoint_of_shards_goes_out_as_that_of_one_process(ranks, make, tmp_path):
    """`narrowgauge export RUN@STEP`: codes, scales and recorded scales of x, to the bit."""
    common = {"recipe": "fp8-delayed", "steps": 3, "checkpoint_every": 2}
    config, one = make("shards", parallel="fsdp", **common), make("one", micro_batches=2, **common)
    assert loop.run(one) == 0 and ranks(2)(trained, config) == [0, 0]
    assert shards_of(saved(config) / "step-00000002") == ["rank-00000", "rank-00001"]
    files = {}
    for each in (config, one):
        out = tmp_path / "out" / Path(each.output).name
        options = exporting.Options(format="fp8-static", output=out, load=False)
        report = exporting.exported(f"{each.output}@2", options)
        assert len(report.narrow) == 14 and report.facts["training"]["steps"] == 2
        files[out.name] = (out / "model.safetensors").read_bytes()
    assert files["shards"] == files["one"]


@pytest.mark.slow
def test_the_best_weights_of_shards_are_exported_after_a_resumption(ranks, make, before_step):
    """The weights are spoilt before step 5, and the run stopped after step 6."""
    common = {"recipe": "fp8-delayed", "steps": 7, "eval_every": 1, "best": "loss"}
    reference = make("reference", micro_batches=2, **common)
    before_step(5, lambda trainer: faulty_run.apply("spoil", trainer))
    assert loop.run(reference) == 0
    config = make("best", parallel="fsdp", **common)
    assert ranks(2)(trained, config, [("stop", 0, 6), ("spoil", 0, 5), ("spoil", 1, 5)]) == [
        130,
        130,
    ]
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    first, second = Path(config.output), Path(reference.output)
    assert os.listdir(first / "best") == os.listdir(second / "best") == ["step-00000004"]
    assert (first / "final" / "model.safetensors").read_bytes() == (
        second / "final" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp"])
def test_the_scales_of_gradient_messages_go_on(ranks, make, layout):
    """What ranks send in fp8-lm depends on how many they are: so two ranks that stopped are compared with two that did not."""
    common = {"recipe": "fp8-row", "steps": 6, "gradients": "fp8-lm", "parallel": layout}
    calm, config = make("calm", **common), make("stopped", **common)
    assert ranks(2)(trained, calm) == [0, 0]
    assert ranks(2)(trained, config, [("stop", 1, 3)]) == [130, 130]
    [checkpoint] = saved(config).iterdir()
    assert store.load(checkpoint).facts["agreement"]["gradients"]["mu"]
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    same_run(Path(config.output), Path(calm.output))
    ours, theirs = (
        store.load(saved(each) / "step-00000006").facts["agreement"] for each in (config, calm)
    )
    assert ours == theirs


@pytest.mark.slow
def test_a_run_whose_optimizer_has_no_state_yet_goes_on(ranks, make, before_step):
    """Its only step overflowed in float16, so no parameter was updated."""
    common = {"recipe": "fp8-row", "precision": "amp-fp16", "optimizer": "lion", "steps": 3}
    reference = make("reference", micro_batches=2, **common)
    before_step(1, lambda trainer: faulty_run.apply("overflow", trainer))
    assert loop.run(reference) == 0
    config = make("stopped", parallel="fsdp", **common)
    assert ranks(2)(trained, config, [("stop", 0, 1), ("overflow", 1, 1)]) == [130, 130]
    [checkpoint] = saved(config).iterdir()
    assert store.load(checkpoint).tensors["optimizer"] == {}
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_as_in_one_process(ranks, make):
    config = make("run", parallel="fsdp", steps=4)
    assert ranks(2)(trained, config) == [0, 0]
    said = ranks(2)(trained, replace(config, resume=True, steps=3))
    assert_all_end(
        said, r"ConfigError: (rank 1: )?training.steps = 3: the run is at step 4 already"
    )
    (Path(config.output) / "config.toml").unlink()
    said = ranks(2)(trained, replace(config, resume=True, hidden_size=64))
    assert_all_end(
        said, r"CheckpointError: .*: a checkpoint of another model or recipe: model\.embed"
    )


# --- the trained weights


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made by what runs inside, that were held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to local tensors comes here
        found = function(*given, **(named or {}))
        before = {
            each.untyped_storage()._cdata
            for each in tree_leaves((given, named))
            if type(each) is torch.Tensor
        }
        for each in tree_leaves(found):
            if (
                type(each) is torch.Tensor
                and each.untyped_storage()._cdata not in before - self.held.keys()
            ):
                storage = each.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {
            key: (storage, size)
            for key, (storage, size) in self.held.items()
            if not storage.expired()
        }
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        return found


def counted_export(config: Any) -> tuple[Any, int]:
    """The exit code, and the most bytes that were held while the final folder was made."""
    counter = LiveBytes()

    def counted(work: Any) -> Any:
        def run(*given: Any) -> Any:
            with counter:
                return work(*given)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("trained_weights", "export"):
            patch.setattr(one_run, name, counted(getattr(one_run, name)))
        return trained(config), counter.most


@pytest.mark.slow
def test_rank_0_holds_the_trained_weights_once_and_the_others_one_tensor(ranks, make):
    """Beside its shard: all of them, and one more while it is gathered. Every byte of tensors is counted, not the process's."""
    config = make(parallel="fsdp", steps=1)
    (first, most), (second, other) = ranks(2)(counted_export, config)
    assert (first, second) == (0, 0)
    weights = load_file(Path(config.output) / "final" / "model.safetensors").values()
    all_bytes, largest = sum(each.nbytes for each in weights), max(each.nbytes for each in weights)
    assert all_bytes <= most <= all_bytes + 2 * largest < 2 * all_bytes
    assert largest <= other <= 2 * largest


# --- through the command


def command(number: int, settings: Path, fault: str, *more: str) -> str:
    """What `narrowgauge train` says on so many ranks of torchrun, 1 being a process without it."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        if number > 1
        else []
    )
    return run([PYTHON, *launch, PROGRAM, *fault.split(), "train", settings, *more]).stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten processes, which start slowly on a busy machine
def test_two_ranks_then_one_then_four_then_two_are_one_process(tmp_path):
    """Steps of two rows: two ranks or micro-batches have one each, two of four ranks nothing to learn. So all sums are of two terms."""
    data = folders.prompts(tmp_path / "prompts.jsonl")
    common = {
        "task": "causal-lm",
        "model": folders.llama(tmp_path / "llama"),
        "data": data,
        "packing": 64,
    }
    common |= {
        "token_budget": 128,
        "steps": 8,
        "recipe": "fp8-delayed",
        "cache": tmp_path / "cache",
        "seed": 3,
    }
    reference = folders.settings(tmp_path / "reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = folders.settings(tmp_path / "chain", **common)
    settings = tmp_path / "settings.toml"
    settings.write_text(toml.dump(config), encoding="utf-8")
    chain = [
        (2, "stop 1 2", ["--parallel=fsdp"], ["rank-00000", "rank-00001"]),
        (1, "stop 0 4", ["--resume", "--batch.micro-batches=2"], []),
        (
            4,
            "stop 3 6",
            ["--resume", "--parallel=dp=2,fsdp=2"],
            [f"rank-{rank:05d}" for rank in range(4)],
        ),
        (2, "none 0 0", ["--resume", "--parallel=fsdp"], ["rank-00000", "rank-00001"]),
    ]
    for turn, (number, fault, more, expected) in enumerate(chain, 1):
        said = command(number, settings, fault, *more)
        last = max(saved(config).iterdir())
        assert (last.name, shards_of(last)) == (f"step-0000000{2 * turn}", expected), said
    folder = Path(config.output)
    assert [event["step"] for event in tiny.events(folder, "resume")] == [2, 4, 6]
    same_run(folder, Path(reference.output))
    ours, theirs = (store.load(saved(each) / "step-00000008").facts for each in (config, reference))
    assert ours["position"] == theirs["position"] and ours["agreement"] == theirs["agreement"]
    final = [
        (Path(each.output) / "final" / "model.safetensors").read_bytes()
        for each in (config, reference)
    ]
    assert final[0] == final[1]
