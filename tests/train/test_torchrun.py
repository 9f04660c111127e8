"""A run on the ranks of torchrun is the run of one process with their micro-batches, and ends as one (exact).

Most tests train in the processes of `ranks`; what ends a process is tried under torchrun itself.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from narrowgauge import recipes
from narrowgauge.errors import ConfigError, PeerError, Reason
from narrowgauge.lab.training import EXTENSIONS
from narrowgauge.train import loop
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.config.settings import replace, resolved
from narrowgauge.train.parallel import followers
from narrowgauge.train.parallel import ranks as ranks_module
from narrowgauge.train.parallel.ranks import EndedElsewhere, Ranks, restarted, under_torchrun
from narrowgauge.train.signals import StopRequest
from narrowgauge.train.trainer import Trainer
from narrowgauge.train.validation import Validation
from tests.processes import PYTHON, ROOT, run
from tests.raising import coded, raises
from tests.selection import quick
from tests.train import faulty_run, tiny
from tests.train.tasks import folders

NUMBERS = itertools.count()  # of runs, the same on all ranks
PROGRAM = Path(faulty_run.__file__)


def trained(config, faults=()):
    """The exit code of this rank, or what it raised. faults: (fault, rank, step)."""
    place = dist.PrefixStore(f"run-{next(NUMBERS)}", dist.distributed_c10d._get_default_store())
    real = Trainer._optimizer_step
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for fault in faults:
        faulty_run.install(*fault)
    try:
        own = Ranks(dist.get_rank(), dist.get_world_size(), store=place, timeout_s=60)
        with StopRequest(patient=True) as stop, own.ending_together(), followers.silent(own):
            return loop.run_of_rank(resolved(config), own, stop, EXTENSIONS)
    except Exception as error:
        return Reason(getattr(error, "code", ""), f"{type(error).__name__}: {error}")
    finally:
        Trainer._optimizer_step = real
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def each(configs):
    return [trained(config) for config in configs]


def same_run(folder, reference):
    assert tiny.losses(folder) == tiny.losses(reference)
    assert [event["loss"] for event in tiny.events(folder, "eval")] == [
        event["loss"] for event in tiny.events(reference, "eval")
    ]
    assert tiny.digests(folder) == tiny.digests(reference)


# --- the same numbers

NEEDY = ["fp8-delayed", "int4-hq-lss", "int4-hq-bs"]  # recipes with memory and with random numbers


@pytest.mark.parametrize("layout", quick(["fsdp"], ["dp", "fsdp"]))
@pytest.mark.parametrize("recipe", quick(NEEDY[:1], recipes.names()))
def test_two_ranks_are_one_process_with_two_micro_batches(ranks, make, recipe, layout):
    common = {"recipe": recipe, "steps": 3, "eval_every": 2}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("ranks", parallel=layout, **common)
    assert ranks(2)(trained, config) == [0, 0]
    same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"),
    quick([("none", "dp")], [("none", "dp"), ("none", "fsdp"), ("fp8-delayed", "dp")]),
)
def test_dropout_leaves_out_what_one_process_does(ranks, tmp_path, recipe, layout):
    """Not the same elements on all ranks; and a run that one process resumes goes on with those that would have come."""
    common = {
        "task": "classification",
        "model": folders.bert(tmp_path / "bert"),
        "recipe": recipe,
        "checkpoint_every": 2,
    }
    common |= {"data": folders.classes_csv(tmp_path / "classes.csv"), "cache": tmp_path / "cache"}
    reference = folders.settings(tmp_path / "reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = folders.settings(tmp_path / "ranks", parallel=layout, **common)
    assert ranks(2)(trained, config) == [0, 0]
    same_run(Path(config.output), Path(reference.output))
    shutil.rmtree(Path(config.output) / "checkpoints" / "step-00000004")
    assert loop.run(replace(config, parallel="", micro_batches=2, resume=True)) == 0
    same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shards_compile(ranks, make):
    """Bounded: Inductor fuses what is around the products and keeps it in float32 where eager mode rounds to bfloat16."""
    common = {"recipe": "fp8-current", "parallel": "fsdp", "steps": 3, "eval_every": 2}
    reference, config = make("reference", **common), make("compiled", compile=True, **common)
    assert ranks(2)(each, [reference, config]) == [[0, 0], [0, 0]]
    assert tiny.losses(Path(config.output)) == pytest.approx(
        tiny.losses(Path(reference.output)), rel=1e-3
    )
    assert all(event["compiled_graphs"] > 0 for event in tiny.events(Path(config.output), "step"))


OPTIMIZERS = [
    {"optimizer": "adamw", "states": "8bit"},
    {"optimizer": "lion", "states": "4bit", "precision": "bf16-o2", "master": "bf16-remainder"},
    {"optimizer": "sgd", "states": "fp8", "precision": "bf16-o3"},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp"])
@pytest.mark.parametrize("settings", quick(OPTIMIZERS[1:2], OPTIMIZERS), ids=str)
def test_so_are_the_states_of_every_optimizer(ranks, make, settings, layout):
    common = {"hidden_size": 64, "intermediate_size": 96, "steps": 3, **settings}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("ranks", parallel=layout, **common)
    assert ranks(2)(trained, config) == [0, 0]
    same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "dp=2,fsdp=2"])
def test_an_overflow_of_float16_in_one_shard_is_known_to_all(ranks, make, before_step, layout):
    """All leave that step out and lower the scale. Four ranks add up in another order, so of them the scale and the steps are compared."""
    common = {"recipe": "fp8-delayed", "precision": "amp-fp16", "steps": 4, "batch_size": 4}
    several = 4 if "dp" in layout else 2
    reference = make("reference", micro_batches=several, **common)
    before_step(2, lambda trainer: faulty_run.apply("overflow", trainer))
    assert loop.run(reference) == 0
    config = make("ranks", parallel=layout, **common)
    # One shard of each copy, whose gradients are equal.
    faults = [("overflow", rank, 2) for rank in range(1, several, 2)]
    assert ranks(several)(trained, config, faults) == [0] * several
    ours, theirs = tiny.digests(Path(config.output)), tiny.digests(Path(reference.output))
    assert ours["scaler"] == theirs["scaler"] and "32768.0" in ours["scaler"]
    assert ours["optimizer: state.0.step"] == theirs["optimizer: state.0.step"]
    if several == 2:
        same_run(Path(config.output), Path(reference.output))


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick(["fsdp"], ["dp", "fsdp"]))
def test_stopped_on_two_ranks_it_goes_on_in_one_process_and_on_two_again(
    ranks, make, before_step, layout
):
    """Ctrl-C reaches rank 1 alone: both finish the step, and save one checkpoint."""
    common = {"recipe": "fp8-delayed", "steps": 6, "batch_size": 4}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("stopped", parallel=layout, **common)
    assert ranks(2)(trained, config, [("stop", 1, 2)]) == [130, 130]
    before_step(5, lambda trainer: faulty_run.apply("stop", trainer))
    assert loop.run(replace(config, resume=True, parallel="", micro_batches=2)) == 130
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    same_run(Path(config.output), Path(reference.output))
    assert [event["step"] for event in tiny.events(Path(config.output), "resume")][-1] == 5
    assert (Path(config.output) / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_hsdp_and_four_ranks_start_from_the_same_loss(ranks, make):
    """Sums of four terms are in another order; the first loss is computed before any."""
    common = {"recipe": "fp8-row", "steps": 2}
    reference = make("reference", micro_batches=4, **common)
    assert loop.run(reference) == 0
    config = make("ranks", parallel="dp=2,fsdp", **common)
    assert ranks(4)(trained, config) == [0, 0, 0, 0]
    ours, theirs = tiny.losses(Path(config.output)), tiny.losses(Path(reference.output))
    assert ours[1] == theirs[1] and ours[2] == pytest.approx(theirs[2], rel=1e-4)


def counted(config):
    """The exit code of this rank, and how many batches it evaluated."""
    real, calls = Validation._score, []
    Validation._score = lambda validation, batch: calls.append(0) or real(validation, batch)
    try:
        return trained(config), len(calls)
    finally:
        Validation._score = real


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick(["fsdp"], ["dp", "fsdp"]))
def test_ranks_share_the_validation_data(ranks, make, layout):
    """Five batches, of which each rank computes three: the sixth is one of them once more, and counts once."""
    common = {"steps": 1, "eval_tokens": 5 * 64 - 7, "eval_wide": False}
    reference = make("reference", micro_batches=2, **common)
    assert loop.run(reference) == 0
    config = make("ranks", parallel=layout, **common)
    assert ranks(2)(counted, config) == [(0, 3), (0, 3)]
    ours, theirs = (tiny.events(Path(each.output), "eval")[-1] for each in (config, reference))
    assert (ours["loss"], ours["tokens"]) == (theirs["loss"], theirs["tokens"]) and ours[
        "tokens"
    ] == 5 * 64 - 7


# --- differences between ranks


@pytest.mark.slow
def test_a_weight_that_differs_is_named_within_the_interval(ranks, make):
    config = make(recipe="fp8-delayed", digest_every=2, steps=6)
    for said in ranks(2)(trained, config, [("weight", 1, 3)]):
        assert said.startswith("DriftError: ") or said.startswith("EndedElsewhere")
        if said.startswith("DriftError"):
            assert re.search(
                r"step 4: model\.layers\.1\.mlp\.down_proj\.weight differs between rank 0 and rank 1",
                said,
            )
    assert list(tiny.losses(Path(config.output))) == [1, 2, 3, 4]


def other_settings(config):
    return trained(replace(config, learning_rate=0.5) if dist.get_rank() else config)


@pytest.mark.slow
def test_other_settings_on_a_rank_are_named(ranks, make):
    said = sorted(ranks(2)(other_settings, make()))
    assert "settings: learning_rate is '0.001' on rank 0 and '0.5' on rank 1" in said[0]
    assert said[1].startswith("EndedElsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp"])
def test_a_nan_on_one_rank_ends_both_with_one_name(ranks, make, layout):
    said = sorted(ranks(2)(trained, make(recipe="fp8-row", parallel=layout), [("nan", 1, 2)]))
    assert said[0].startswith("EndedElsewhere") and "NumericsError: " in said[1]
    assert (
        "the parameter 'model.layers.1.mlp.down_proj.weight' itself" in said[1]
        and "on rank 1" in said[1]
    )


# --- settings

WRONG = {
    "fsdp=3": coded("parallel.ranks", "3 ranks", "2 ranks"),
    "fdsp=2": coded("parallel.key", "'fdsp'", "Closest: 'fsdp'"),
    "fsdp=2,fsdp=1": coded("parallel.twice", "'fsdp'"),
    "dp,fsdp": coded("parallel.two-open"),
    "fsdp=two": coded("parallel.number", "'fsdp=two'"),
    "fsdp=0": coded("parallel.number", "'fsdp=0'"),
    "tp=3": coded("parallel.ranks", "3 ranks", "--nproc-per-node 3", "'dp'"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_layout_is_refused_in_a_sentence(text):
    with raises(ConfigError, WRONG[text]):
        parallel_syntax.layout(text, 2)


def test_a_key_without_a_number_takes_the_rest():
    assert str(parallel_syntax.layout("", 4)) == "dp=4"
    assert str(parallel_syntax.layout("dp=2, fsdp", 8)) == "dp=2,fsdp=4"
    assert str(parallel_syntax.layout("fsdp", 1)) == "dp=1"
    assert str(parallel_syntax.layout("fsdp=2,tp=1,pp=1", 2)) == "fsdp=2"
    assert str(parallel_syntax.layout("fsdp=1,pp", 2)) == "pp=2"
    assert str(parallel_syntax.layout("tp=2,fsdp", 8)) == "fsdp=4,tp=2"


def test_a_layout_that_does_not_fit_is_told_one_that_does():
    with raises(ConfigError, "parallel.ranks", "parallel = 'dp,tp=2'"):
        parallel_syntax.layout("tp=2", 8)


def test_ranks_that_share_products_or_stages_read_the_same_data():
    sizes = parallel_syntax.layout("dp=2,fsdp=2,tp=2", 8)
    assert [sizes.share(rank) for rank in range(8)] == [
        (0, 4),
        (0, 4),
        (1, 4),
        (1, 4),
        (2, 4),
        (2, 4),
        (3, 4),
        (3, 4),
    ]
    assert sizes.readers(5) == [4, 5]
    four = parallel_syntax.layout("fsdp=2,pp=2", 4)
    assert [four.share(rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [four.readers(rank) for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_one_process_refuses_two(make):
    with raises(ConfigError, "parallel.ranks", "1 rank", "--nproc-per-node 2"):
        loop.run(make(parallel="fsdp=2"))


def test_a_batch_that_ranks_cannot_share_is_refused(ranks, make):
    said = sorted(ranks(2)(trained, make(batch_size=3)))
    assert "batch.size = 3: must be a multiple of 2, the micro-batches of 2 ranks" in "".join(said)


def joined(monkeypatch, **variables):
    given = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **variables,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with Ranks.join("cpu", 1):
        pass


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "first"}, coded("torchrun.number", "RANK = 'first'")),
        ({"WORLD_SIZE": ""}, coded("torchrun.number", "WORLD_SIZE = ''")),
        ({"LOCAL_RANK": "-1"}, coded("torchrun.number", "LOCAL_RANK = '-1'")),
        ({"MASTER_PORT": "auto"}, coded("torchrun.number", "MASTER_PORT = 'auto'")),
        ({"RANK": "2"}, coded("torchrun.rank", "= 2", "WORLD_SIZE")),
    ],
)
def test_an_environment_that_torchrun_would_not_set_is_refused(monkeypatch, variables, words):
    with raises(ConfigError, words):
        joined(monkeypatch, **variables)


@pytest.mark.parametrize(
    "given", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}]
)
def test_a_part_of_what_torchrun_sets_is_refused(monkeypatch, given):
    """Else each rank would train alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with raises(ConfigError, "torchrun.variables", "= 2", "WORLD_SIZE", "MASTER_PORT"):
        under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not under_torchrun()


def test_a_count_of_restarts_that_is_none_is_refused(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "x")
    with raises(ConfigError, "torchrun.number", "TORCHELASTIC_RESTART_COUNT = 'x'"):
        restarted()


@pytest.mark.slow
def test_ranks_that_never_come_are_told_within_the_time_out(monkeypatch):
    with raises(PeerError, "ranks.timeout", "rank 0", "of 2", "within 1"):
        joined(monkeypatch)


class Store:
    """Rank 0 has set nothing for a hundred looks, then what is asked for."""

    def __init__(self, after):
        self.looks, self.after = 0, after

    def check(self, keys):
        self.looks += 1
        return self.looks > 100 and keys == [self.after]

    def get(self, key):
        return json.dumps(
            {"rank": 0, "code": 6, "words": "rank 0 was stopped for 3 s (timeout_s)."}
        )


def test_others_wait_for_the_first_rank_until_it_is_done_or_named(monkeypatch):
    """As long as it takes: its sentinel reports an end, a stop and a hang (tests/train/liveness)."""
    monkeypatch.setattr(ranks_module, "POLL_S", 0.0)
    done, failed = Store("first-1"), Store("failed")
    assert Ranks(1, 2, store=done, timeout_s=3).first(lambda: None) is None and done.looks > 100
    with pytest.raises(EndedElsewhere) as caught:
        Ranks(1, 2, store=failed, timeout_s=3).first(lambda: None)
    assert caught.value.exit_code == 6 and failed.looks > 100


# --- under torchrun


def torchrun(config, text, fault="none 0 0", more=(), options=()):
    """(what was said, seconds)."""
    launch = [
        PYTHON,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
    ]
    started_at_s = time.monotonic()
    done = run([*launch, PROGRAM, *fault.split(), "train", *tiny.flags(config, text), *more])
    return done.stderr, time.monotonic() - started_at_s


def told(stderr):
    return [line for line in stderr.splitlines() if line.startswith("narrowgauge: ")]


@pytest.mark.slow
def test_a_rank_that_dies_is_named(make, text):
    config = make(steps=100)
    said, _ = torchrun(config, text, "kill 1 3")
    [line] = told(said)
    assert re.search(
        r"step 2: rank 1 of 2 \(.+\) (was killed by SIGKILL|ended without a word)", line
    )
    assert "--resume" in line
    assert re.search(
        r"rank +: 0 .*\n +exitcode +: (6|-15) ", said
    )  # torchrun's SIGTERM may come first


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_time_out(make, text):
    said, spent_s = torchrun(
        make(steps=100), text, "hang 1 3", ["--parallel.timeout-s=30"], ["--shutdown-timeout", "1"]
    )
    [line] = told(said)
    assert re.search(
        r"rank 1 of 2 (did not answer within|\(.+\) was stopped for) 30 s \(timeout_s\)", line
    )
    assert re.search(
        r"^WARNING: step 2: rank 1 of 2 \(.+\) is stopped by a signal \(SIGSTOP\)",
        said,
        re.MULTILINE,
    )
    assert spent_s < 240


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line", "code"),
    [
        ("data 1 3", "narrowgauge: rank 1: shard-7.jsonl:12: is not JSON. Correct the line.", 3),
        ("disk 0 3", "narrowgauge: cannot append to", 8),
        ("full 1 3", "narrowgauge: rank 1: cannot save a checkpoint in", 8),
    ],
)
def test_an_error_on_one_rank_ends_all_with_one_message(make, text, fault, line, code):
    said, _ = torchrun(make(steps=100, checkpoint_every=4), text, fault)
    assert [each.startswith(line) for each in told(said)] == [True]
    assert re.findall(r"exitcode +: (\S+)", said) == [str(code)] * 2 or "exitcode  : -15" in said


@pytest.mark.slow
def test_settings_that_are_wrong_are_said_once(make, text):
    said, _ = torchrun(make(), text, more=["--parallel=fsdp=3"])
    [line] = told(said)
    assert "this run has 2 ranks" in line
    said, _ = torchrun(make(), text, more=["--parallel=tp=3"])
    assert len(told(said)) == 1


@pytest.mark.slow
def test_ctrl_c_at_torchrun_saves_and_ends_all(make, text):
    """torchrun passes the signal on to every rank, and on to those that are ending once more."""
    config = make(steps=10_000, recipe="fp8-delayed")
    command = [
        PYTHON,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "narrowgauge",
        "train",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    metrics = Path(config.output) / "metrics.jsonl"
    with subprocess.Popen(
        [*command, *tiny.flags(config, text)], stderr=subprocess.PIPE, env=environment
    ) as process:
        while not metrics.exists() or metrics.read_bytes().count(b"step") < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1].decode()
    assert (
        "interrupted at step" in said
        and "Continue: torchrun --nproc-per-node 2 -m narrowgauge train --resume" in said
    )
    [checkpoint] = (Path(config.output) / "checkpoints").iterdir()
    assert store.load(checkpoint).step == len(tiny.losses(Path(config.output)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp"])
def test_torchrun_starts_a_run_again_that_goes_on(make, text, layout):
    reference = make("reference", micro_batches=2, recipe="fp8-delayed")
    assert loop.run(reference) == 0
    config = make("again", recipe="fp8-delayed", checkpoint_every=2)
    torchrun(config, text, "fail 1 5", [f"--parallel={layout}"], ["--max-restarts", "1"])
    assert [event["step"] for event in tiny.events(Path(config.output), "resume")] == [4]
    same_run(Path(config.output), Path(reference.output))
