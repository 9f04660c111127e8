"""200 damaged copies of each JSON file that a run reads back, with right hashes where it has hashes (exact).

Each gives a sentence of a NarrowgaugeError that names the file, or is taken up; never another exception, and never a value that
cannot be: what is taken up is looked at by other means than those of the code under test.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from narrowgauge import manifest
from narrowgauge.diagnose import compare
from narrowgauge.diagnose.runs import decode, read_metrics, read_run
from narrowgauge.errors import CheckpointError, ConfigError, NarrowgaugeError
from narrowgauge.train import loop, preparation
from narrowgauge.train.checkpoint import store
from narrowgauge.train.checkpoint.state import unusable
from narrowgauge.train.checkpoint.store import Best
from narrowgauge.train.config.settings import replace
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.trainer import Trainer
from tests.mutations import mutated
from tests.raising import raises, require, with_code
from tests.selection import quick
from tests.train import tiny

COUNT = 200


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run with windows, a loss scaler, a best model, and evaluations with tensor statistics."""
    config = tiny.settings(
        text, tmp_path_factory.mktemp("finished") / "run", steps=3, recipe="fp8-delayed", precision="amp-fp16", best="loss",
        eval_every=1, tensor_every=1, sample_tokens=4, checkpoint_every=2, warmup_steps=1,
    )  # fmt: skip
    assert loop.run(config) == 0
    return config


@pytest.fixture(scope="module")
def prepared(finished):
    return preparation.prepare(finished)


@pytest.fixture
def copied(finished, tmp_path):
    return replace(
        finished, output=str(shutil.copytree(finished.output, tmp_path / "run")), resume=True
    )


def sentence(error: NarrowgaugeError, name: str) -> None:
    """It names the file, and ends as a sentence does."""
    assert name in str(error) and str(error).rstrip().endswith("."), str(error)
    assert len(str(error)) < 2000, str(error)


def resign(path: Path, name: str, data: bytes) -> None:
    """Puts `data` in place of a file, under right hashes."""
    (path / name).write_bytes(data)
    body = json.loads((path / manifest.NAME).read_bytes())
    body["files"][name] = manifest.listed(data)
    sign(path, {key: value for key, value in body.items() if key != "sha256"})


def sign(path: Path, body: dict) -> None:
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (path / manifest.NAME).write_text(json.dumps({**body, "sha256": digest}, indent=1))


def resumed(config, task, trainer: Trainer | None = None) -> Trainer:
    """The trainer that goes on from the newest checkpoint; `trainer`, made for another folder, is used again."""
    folder = RunFolder(Path(config.output))
    with MetricsLog(folder.metrics) as log:
        if trainer is None:
            return Trainer(config, folder, task, log)
        trainer.checkpoints.folder, trainer.checkpoints.best = folder, Best(folder.best, task.best)
        trainer.checkpoints.resume(trainer.counters, trainer.plugins, log)
        return trainer


def looks_possible(trainer: Trainer) -> None:
    assert (
        0 <= trainer.counters.trained_s < math.inf
        and trainer.counters.skipped_steps >= 0
        and trainer.step == 3
    )
    assert trainer.checkpoints.best.step in (0, 1, 2, 3) and (
        trainer.checkpoints.best.step == 0 or math.isfinite(trainer.checkpoints.best.value)
    )
    for tensor in trainer.model.state_dict().values():
        assert tensor.isfinite().all() and (tensor.dtype == torch.int64) <= bool(
            (tensor >= 0).all()
        )
    for group in trainer.optimizer.param_groups:
        assert (
            group["betas"] == (0.9, 0.95)
            and group["eps"] == 1e-8
            and group["weight_decay"] in (0.1, 0.0)
        )
    for state in trainer.optimizer.state.values():
        assert float(state["step"]) == 3 and float(state["exp_avg_sq"].min()) >= 0
    assert 0 < trainer.passes.scaler.get_scale() < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("count", quick([COUNT // 5], [COUNT // 5, COUNT]))
def test_facts(copied, prepared, count):
    config, task = prepared
    config = replace(config, output=copied.output)
    path = Path(copied.output, "checkpoints", "step-00000003")
    whole = (path / manifest.FACTS).read_text()
    metrics = Path(copied.output, "metrics.jsonl")
    log = metrics.read_bytes()
    trainer = resumed(config, task)
    looks_possible(trainer)
    shutil.rmtree(path.parent / "step-00000002")  # so that nothing older is taken instead
    taken = 0
    for words, damaged in mutated(whole, count, seed=1):
        resign(path, manifest.FACTS, damaged.encode())
        metrics.write_bytes(log)
        try:
            resumed(config, task, trainer)
        except NarrowgaugeError as error:
            sentence(error, "step-00000003")
            continue
        except Exception as error:
            raise AssertionError(words) from error
        taken += 1
        looks_possible(trainer)
    assert taken < count // 3, "most damage is seen"


@pytest.mark.parametrize("count", quick([COUNT // 5], [COUNT // 5, COUNT]))
def test_manifest(copied, count):
    path = Path(copied.output, "checkpoints", "step-00000003")
    whole = (path / manifest.NAME).read_text()
    found = store.load(path)
    for words, damaged in mutated(whole, count, seed=2):
        try:
            body = json.loads(damaged)
            body.pop("sha256", None)
            sign(path, body)
        except (ValueError, AttributeError, RecursionError, TypeError):
            (path / manifest.NAME).write_bytes(damaged.encode(errors="surrogatepass"))
        try:
            taken = store.load(path)
        except NarrowgaugeError as error:
            sentence(error, "step-00000003")
            continue
        except Exception as error:
            raise AssertionError(words) from error
        assert taken.step == found.step and taken.facts == found.facts, words
        assert {n: g.keys() for n, g in taken.tensors.items() if g} == {
            n: g.keys() for n, g in found.tensors.items()
        }, words


def test_run_json(copied):
    path = Path(copied.output, "run.json")
    whole = path.read_text()
    for words, damaged in mutated(whole, COUNT, seed=3):
        path.write_bytes(damaged.encode(errors="surrogatepass"))
        try:
            run = read_run(path)
        except NarrowgaugeError as error:
            sentence(error, "run.json")
            continue
        except Exception as error:
            raise AssertionError(words) from error
        for key in ("parameters", "steps", "threads", "tokens_per_step", "seed"):
            assert isinstance(run.get(key, 0), int) and run.get(key, 0) >= 0, words
        for key in ("recipe", "device", "torch", "precision"):
            assert isinstance(run.get(key, ""), str), words


@pytest.mark.slow
def test_metrics(copied):
    """A line in the midst is damaged, of every event in turn."""
    path = Path(copied.output, "metrics.jsonl")
    lines = path.read_text().splitlines()
    whole = read_metrics(path)
    draw = random.Random(4)
    for _ in range(COUNT):
        place = draw.randrange(len(lines))
        [(words, damaged)] = mutated(lines[place], 1, seed=draw.randrange(2**32))
        path.write_bytes(
            "\n".join([*lines[:place], damaged, *lines[place + 1 :], ""]).encode(
                errors="surrogatepass"
            )
        )
        try:
            events = read_metrics(path)
        except NarrowgaugeError as error:
            sentence(error, "metrics.jsonl")
            assert f":{place + 1}:" in str(error) or "after step" in str(error), f"{words}: {error}"
            continue
        except Exception as error:
            raise AssertionError(words) from error
        compare.compare(events, whole, "one", "other")  # what reads the values goes through
        for event in events:
            assert event["step"] >= 0 and event["event"] in {each["event"] for each in whole}, words
            assert isinstance(event.get("loss", 0), int | float | None), words  # of either sign
            for key in (
                "lr",
                "grad_norm",
                "tokens",
                "elapsed_s",
                "amax",
                "scale",
                "underflow",
            ):
                value = event.get(key, 0)
                assert value is None or (isinstance(value, int | float) and not value < -0.01), (
                    words
                )


def test_decode_of_what_is_deep():
    with pytest.raises(ValueError, match="levels deep"):
        decode("[" * 20_000)


# Tensors that cannot be


def shards(copied) -> dict[str, dict[str, torch.Tensor]]:
    return store.load(Path(copied.output, "checkpoints", "step-00000003")).tensors


def saved_again(copied, tensors, **facts) -> None:
    """The newest checkpoint with other contents and right hashes; the only one."""
    folder = Path(copied.output, "checkpoints")
    found = store.load(folder / "step-00000003")
    shutil.rmtree(folder / "step-00000002")
    store.save(folder, 3, tensors, found.facts | facts)


def first(members: dict[str, torch.Tensor], end: str) -> str:
    return min(name for name in members if name.endswith(end))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("group", "end", "value", "words"),
    [
        ("scaling", "history", -1.0, "history holds -1"),
        ("scaling", "history", NAN, "history holds 1"),
        ("scaling", "live", INF, "live holds 1"),
        ("scaling", "live", -2.5, "live holds -2.5"),
        ("scaling", "nonfinite", -3, "nonfinite holds -3"),
        ("optimizer", "exp_avg", NAN, "exp_avg holds 1"),
        ("optimizer", "exp_avg_sq", NAN, "exp_avg_sq holds 1"),
        ("optimizer", "exp_avg_sq", -1e-3, "exp_avg_sq holds -0.001"),
        ("optimizer", "step", -1.0, "step holds -1"),
        ("rng", "numpy_key", -1, "numpy_key has words from -1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name_and_value(
    copied, prepared, group, end, value, words
):
    tensors = shards(copied)
    name = first(tensors[group], end)
    tensors[group][name].view(-1)[0] = value
    saved_again(copied, tensors)
    config, task = prepared
    with raises(NarrowgaugeError, "checkpoint.state", words):
        resumed(replace(config, output=copied.output), task)


@pytest.mark.parametrize("length", [0, 15, 5055])
def test_a_short_state_of_a_generator_is_refused(copied, prepared, length):
    tensors = shards(copied)
    tensors["rng"]["torch"] = tensors["rng"]["torch"][:length].clone()
    saved_again(copied, tensors)
    config, task = prepared
    with raises(NarrowgaugeError, "checkpoint.state", length):
        resumed(replace(config, output=copied.output), task)


def test_a_moment_of_another_shape_is_refused(copied, prepared):
    tensors = shards(copied)
    name = first(tensors["optimizer"], "exp_avg")
    tensors["optimizer"][name] = torch.zeros(3)
    saved_again(copied, tensors)
    config, task = prepared
    with raises(NarrowgaugeError, "checkpoint.state", "exp_avg", "[3]", "32"):
        resumed(replace(config, output=copied.output), task)


def test_weights_that_are_not_finite_are_passed_over_for_an_older_checkpoint(
    copied, prepared, told
):
    path = Path(copied.output, "checkpoints", "step-00000003")
    from safetensors.torch import load, save

    weights = load((path / "weights-0.safetensors").read_bytes())
    next(iter(weights.values())).view(-1)[:2] = NAN
    resign(path, "weights-0.safetensors", save(weights))
    config, task = prepared
    assert resumed(replace(config, output=copied.output), task).step == 2
    [warning] = with_code(told, "checkpoint.passed-over")
    require(warning, "checkpoint.passed-over", path.name, "2 values")


def test_the_best_weights_of_another_model_are_not_exported(copied):
    folder = Path(copied.output, "best")
    best = store.load(next(folder.iterdir()))
    store.save(folder, best.step, {"weights": {"other": torch.ones(3)}}, best.facts)
    with raises(NarrowgaugeError, "model.best-weights", best.step):
        loop.run(replace(copied, steps=3))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            RuntimeError,
            "Connection closed",
        ),
        (
            ConfigError("AdamW: exp_avg is float32, here int8."),
            CheckpointError,
            "does not fit this run: .*--optimizer.states fp32",
        ),
        (ValueError("numpy_key is short"), CheckpointError, "numpy_key is short"),
    ],
)
def test_what_a_checkpoint_is_not_to_blame_for_is_told_apart(error, kind, words):
    """A rank that is lost while it is read, and settings that are others; else a user would remove what is good."""
    with pytest.raises(kind, match=words), unusable("step-00000002"):
        raise error
