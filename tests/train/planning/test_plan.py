"""`narrowgauge plan` of settings: what a run of them would allocate (within 0.1 %), what it asks of data, folders and caches (nothing)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.errors import ConfigError
from narrowgauge.ops.mm import int8_cpp
from narrowgauge.ops.registry import cpu_facts
from narrowgauge.ops.timing import rates
from narrowgauge.plan.allocations import most_allocated
from narrowgauge.plan.room import KEPT_FREE, Room, gib
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.planning import cache, of_run
from narrowgauge.train.planning.answer import Answers
from narrowgauge.train.planning.command import second_step
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.planning.steps import Source
from narrowgauge.train.planning.techniques import CHEAPEST_FIRST, lines
from tests.plan.test_sharding import MIB, moment, of
from tests.raising import cli_raises, coded, raises
from tests.selection import quick, slow_on_a_plain_cpu
from tests.train.tasks import folders

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "layers": 7, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "vocab_size": 1024, "sequence_length": 128,
    "batch_size": 4, "device": "cpu",
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "narrowgauge" / "plans"


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., TrainConfig]:
    def made(**changes: Any) -> TrainConfig:
        sizes = SIZES if "model" not in changes else {"batch_size": 4, "device": "cpu"}
        return resolved(
            TrainConfig(**(sizes | {"output": str(tmp_path / "never" / "run")} | changes))
        )

    return made


def source(config: TrainConfig) -> Source:
    return Source.of(config)


def folder(path: Path, config: Any) -> str:
    """A model's folder without weights: a plan needs none."""
    config.save_pretrained(path)
    return str(path)


def bert(path: Path) -> str:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    return folder(
        path, transformers.BertConfig(vocab_size=500, max_position_embeddings=64, **sizes)
    )


def t5(path: Path) -> str:
    sizes = {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 32,
        "num_heads": 2,
        "num_layers": 6,
        "num_decoder_layers": 6,
    }
    return folder(
        path,
        transformers.T5Config(vocab_size=500, decoder_start_token_id=0, pad_token_id=0, **sizes),
    )


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("amp", {"layers": 3}),
    ("deep", {}),
    (
        "o2",
        {"precision": "bf16-o2", "recipe": "fp8-row", "states": "8bit", "master": "bf16-remainder"},
    ),
    ("o3", {"precision": "bf16-o3", "recipe": "int8", "states": "4bit", "checkpointing": "full"}),
    ("parts", {"precision": "fp32", "recipe": "none", "micro_batches": 2}),
    (
        "lion",
        {
            "precision": "bf16-o3",
            "optimizer": "lion",
            "states": "8bit",
            "checkpointing": "selective",
        },
    ),
    ("frozen", {"precision": "fp32", "freeze": "embed*,layers.0-3", "recipe": "fp8-delayed"}),
    ("codes", {"embedding_codes": "int4", "layers": 3}),
    *(
        (recipe, {"recipe": recipe, "layers": 3})
        for recipe in ("mxfp4", "nvfp4", "int4-lsq-luq", "int4-row-sr")
    ),
    (
        "coded weights",
        {"embedding_codes": "int8", "precision": "bf16-o2", "recipe": "int4-hq-bs", "layers": 3},
    ),
    (
        "classes",
        {
            "task": "classification",
            "model": bert,
            "data": "nowhere.csv",
            "classes": "3",
            "precision": "fp32",
        },
    ),
    (
        "answers",
        {
            "task": "question-answering",
            "model": bert,
            "data": "nowhere.json",
            "stride": 16,
            "precision": "fp32",
        },
    ),
    ("tags", {"task": "tagging", "model": bert, "data": "nowhere.jsonl", "precision": "fp32"}),
    (
        "choices",
        {"task": "multiple-choice", "model": bert, "data": "nowhere.jsonl", "precision": "fp32"},
    ),
    (
        "pairs",
        {
            "task": "seq2seq",
            "model": t5,
            "data": "nowhere.csv",
            "max_length": 32,
            "precision": "fp32",
            "recipe": "fp8-row",
        },
    ),
]


@pytest.mark.slow
@slow_on_a_plain_cpu
@pytest.mark.parametrize(
    ("name", "changes"),
    quick(RUNS[:1], RUNS),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_planned_is_what_a_run_allocates(name, changes, settings, tmp_path, cpu):
    """Two real steps of the trainer's own parts on a CPU, with bfloat16 instructions and without, whose data nobody has."""
    made = {
        key: value(tmp_path / "model") if callable(value) else value
        for key, value in changes.items()
    }
    config = settings(**made)
    planned = second_step(Counts(cpu, full=True).whole(source(config)))
    # INT8 products pack into memory that each thread keeps, 4 MiB a side at most, and that is not counted.
    for side in ("left", "right"):
        setattr(int8_cpp._MEMORY, side, torch.empty(5 << 20, dtype=torch.uint8))
    real = most_allocated(source(config).builder(place=CPU, real=True)(), CPU)
    # Of classes a mask is counted, which transformers leaves out where it sees that nothing is padded: 11 KiB of 11 MiB.
    assert planned == pytest.approx(
        real, rel=2e-3 if made.get("model") and name != "pairs" else 1e-3
    )
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [bert, t5])
def test_models_from_folders_are_carried_on_from_few_layers(kind, settings, tmp_path):
    """Of both stacks of an encoder-decoder."""
    task = "classification" if kind is bert else "seq2seq"
    own = {"classes": "2"} if kind is bert else {}
    config = settings(
        task=task, model=kind(tmp_path / "model"), data="nowhere.csv", max_length=48, **own
    )
    few, whole = (Counts(cpu_facts(), full).of(config) for full in (False, True))
    assert few.counted == "3 and 4 of 6 layers" and whole.counted == "all 6 layers"
    assert (
        few.allocated == pytest.approx(whole.allocated, rel=1e-3)
        and few.top.phase == whole.top.phase
    )


@pytest.mark.slow
def test_settings_that_treat_layers_differently_are_counted_in_full(settings):
    for changes, why in (
        ({"checkpointing": "every-2"}, "memory.checkpointing = 'every-2'"),
        ({"freeze": "layers.0-2"}, "freeze names"),
        ({"layers_recipe": {"layers.0.*": "bf16"}}, "recipes names"),
        ({"recipe": "nvfp4"}, "recipe 'nvfp4' keeps the last 15%"),
    ):
        assert why in Counts(cpu_facts()).of(settings(**changes)).counted


@pytest.mark.slow
def test_a_plan_on_the_command_line(tmp_path, capsys, own_cache):
    """Once counted, then from the cache; a damaged entry counts as absent."""
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in SIZES.items()]
    arguments = ["plan", *sizes, "--recipe=none", f"--output={tmp_path / 'never' / 'run'}"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert (
        "name a card" in first and "Counted: 3 and 4 of 7 layers" in first and "mlp.act_fn" in first
    )
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is None and answer["batch"] == {
        "rows": 4,
        "width": 128,
        "micro_batches": 1,
    }
    assert answer["allocated_bytes"] == pytest.approx(sum(answer["parts"].values()), rel=0.01)
    for entry in own_cache.glob("*.json"):
        entry.write_text(entry.read_text()[:100])
    assert main(arguments) == 0 and capsys.readouterr().out == first
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_the_step_without_low_precision_stands_beside_it(capsys, own_cache):
    """Its time and memory are those of its own plan, as told by the command; without a card there is no time."""
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in SIZES.items()]
    answers = {}
    for recipe, card in (("fp8-current", "h100"), ("none", "h100"), ("fp8-current", "")):
        main(["plan", *sizes, f"--recipe={recipe}", f"--card={card}", "--json"])
        answers[recipe, card] = json.loads(capsys.readouterr().out)
    own, plain = answers["fp8-current", "h100"], answers["none", "h100"]
    assert own["wide"]["seconds"] == plain["time"]["seconds"]
    assert own["wide"]["allocated_bytes"] == plain["allocated_bytes"]
    gain = plain["time"]["seconds"] / own["time"]["seconds"]
    assert own["wide"]["times_as_fast"] == list(rates.likely_gain(gain, "step"))
    assert "wide" not in plain and "wide" not in answers["fp8-current", ""]


@pytest.mark.slow
def test_beside_adapters_over_codes_stand_adapters_over_16_bits(tmp_path, capsys, own_cache):
    base = folders.llama(tmp_path / "base", folders.byte_tokenizer())
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    flags = [
        "plan", "--task=causal-lm", f"--model={base}", f"--data={tmp_path / 'pairs.jsonl'}", "--lora=r=4", "--card=h100", "--json",
    ]  # fmt: skip
    answers = []
    for numbers in (["--base=int8"], ["--recipe=none"]):
        main([*flags, *numbers])
        answers.append(json.loads(capsys.readouterr().out))
    own, plain = answers
    assert own["wide"]["allocated_bytes"] == plain["allocated_bytes"]
    assert own["wide"]["seconds"] == plain["time"]["seconds"]


@pytest.mark.parametrize("fixed", [0.0, 0.3])
@pytest.mark.parametrize("most", [0, 1, 2, 5, 100, 3001, 40_000])
def test_the_largest_batch_is_found_in_few_traces(settings, most, fixed):
    """Of memory that grows by the row: exact where rows are few, else within 0.1 %; each trace is new."""
    answers = Answers(settings(), Room.of("", "1GiB"), Counts(cpu_facts()))
    limit = int(answers.room.usable / (1 + KEPT_FREE))
    row = limit * (1 - fixed) / (most + 0.5)
    traced: list[int] = []

    class Linear:
        def of(self, config, shape):
            traced.append(shape.rows)
            return SimpleNamespace(allocated=int(limit * fixed + row * shape.rows))

    answers = replace(answers, counts=Linear())
    rows = answers.largest_batch(answers.shape())["rows"]
    assert rows <= most and rows >= most - (most * 0.002 if most > 500 else 0)
    assert len(set(traced)) == len(traced) <= 6


@pytest.mark.slow
def test_the_largest_batch_is_the_last_that_fits(settings):
    """Of the rows that are counted, one more does not fit."""
    config = settings()
    answers = Answers(config, Room.of("", "1GiB"), Counts(cpu_facts()))
    shape = answers.shape()
    rows = answers.largest_batch(shape)["rows"]
    sizes = [
        answers.counts.of(config, replace(shape, rows=each)).allocated for each in (rows, rows + 1)
    ]
    assert rows > 4 and sizes[0] <= int(answers.room.usable / (1 + KEPT_FREE)) < sizes[1]


@pytest.mark.slow
def test_a_budget_that_larger_batches_pass_does_not_end_the_plan(settings):
    """They are refused by the settings, so they do not fit; the run as it is has an answer."""
    config = settings(layers=3, sequence_length=32, checkpointing="budget:64MiB")
    answers = Answers(config, room := Room.of("l4", ""), Counts(room.device))
    found = answers.answer()
    assert found["fits"] and found["largest"]["rows"] >= 64 * config.batch_size
    with raises(ConfigError, "checkpointing.budget", "67,108,864"):
        answers.counts.of(config, replace(answers.shape(), rows=2**16))


@pytest.mark.slow
@pytest.mark.timeout(900)  # three minutes of a processor; 300 s ran out beside other work
def test_what_does_not_fit_is_told_what_would(tmp_path, capsys):
    """Lines for the settings file make it fit; every second of them is tried."""
    sizes = SIZES | {"sequence_length": 512, "precision": "bf16-o2", "vocab_size": 4096}

    def asked(given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        code = main(["plan", *flags, f"--output={tmp_path / 'r'}", "--memory=690MiB", "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, answer = asked(sizes)
    assert (
        code == 9
        and answer["fits"] is False
        and answer["changes"]
        and "too much" in answer["verdict"]
    )
    for change in answer["changes"][::2]:
        code, changed = asked(
            sizes | dict(line.replace("'", "").split(" = ") for line in change["lines"])
        )
        assert code == 0 and changed["allocated_bytes"] == change["allocated_bytes"]


@pytest.mark.slow
def test_where_single_techniques_are_enough_all_together_are_not_counted(settings, monkeypatch):
    """It would take longer than counting these."""
    config, counts = (
        settings(sequence_length=512, precision="bf16-o2", vocab_size=4096),
        Counts(cpu_facts()),
    )
    monkeypatch.setattr(
        Answers, "_hopeless", lambda self: pytest.fail("all that saves memory was counted")
    )
    needed, spare = counts.of(config).allocated, Room.of("", "8GiB")
    answer = Answers(
        config, Room.of("", f"{8 * 2**30 - spare.usable + int(0.95 * needed)}B"), counts
    ).answer()
    assert answer["fits"] is False and answer["changes"]
    least = gib(counts.of(Answers(config, spare, counts)._everything()).allocated)
    assert least not in answer["verdict"], "that sentence is for runs that nothing makes fit"


@pytest.mark.slow
def test_what_fits_on_several_cards_alone_is_told_with_its_settings(settings):
    """No technique is counted by itself where all together are too large, and the ranks' settings are there to be copied."""
    config = settings(hidden_size=1024, intermediate_size=2816, heads=8, kv_heads=8, batch_size=1)
    counts = Counts(cpu_facts())
    least = counts.of(Answers(config, Room.of("", "8GiB"), counts)._everything()).allocated
    spare = Room.of("", "8GiB")
    answers = Answers(
        config, Room.of("", f"{8 * 2**30 - spare.usable + int(0.9 * least)}B"), counts
    )
    answer = answers.answer()
    assert answer["fits"] is False
    (change,) = answer["changes"]
    [ranks] = [
        found[1] for line in change["lines"] if (found := re.match(r"parallel = 'fsdp=(\d+)", line))
    ]
    assert f"{ranks} such cards" in answer["verdict"] and change["allocated_bytes"] < least
    assert len(counts.known) < 8


def test_refusals(tmp_path, capsys):
    output = f"--output={tmp_path / 'r'}"
    cli_raises(["plan", "--recipe=auto", output], ConfigError, "plan.auto-recipe", "'auto'")
    cli_raises(["plan", "--card=h1000", output], ConfigError, "card.unknown", "'h100'")
    assert main(["plan", "--batch.size=5", "--batch.micro-batches=2"]) == 2
    stages = ["--parallel=pp=8", "--model.layers=4", "--batch.micro-batches=8", "--batch.size=8"]
    cli_raises(["plan", *stages], ConfigError, "pipeline.blocks", "4 layers", "8 stages")
    for layout, expected in (
        ("fsdp", coded("plan.rank-count", "fsdp=8")),
        ("tp=3", coded("tensor-parallel.head-count", "num_attention_heads = 4")),
        ("dp=3", coded("parallel.batch-size", "3 ranks")),
        ("pp=2", coded("pipeline.micro-batches", "2 stages")),
        ("dp=2 --parallel.weights=codes", coded("parallel.weights", "'codes'")),
        ("tp=2 --parallel.gradients=fp8", coded("parallel.no-gradients", "'fp8'")),
    ):
        sizes = [
            "--model.layers=4",
            "--model.heads=4",
            "--model.hidden-size=64",
            "--data.vocab-size=300",
        ]
        cli_raises(["plan", *f"--parallel={layout}".split(), *sizes], ConfigError, expected)
    cli_raises(["plan", "--picture=x.txt"], ConfigError, "picture.suffix", ".png")


def test_a_tokenizer_that_changed_is_another_question(tmp_path):
    config, file = TrainConfig(tokenizer=str(tmp_path)), tmp_path / "tokenizer.json"
    file.write_text("{}", encoding="utf-8")
    before = cache.question_of(config)
    assert cache.question_of(config) == before
    file.write_text('{"version": "1.0"}', encoding="utf-8")
    assert cache.question_of(config) != before


def test_techniques_change_what_they_say(settings):
    """Each is one that the settings know, is not offered twice, and leaves a valid configuration."""
    config = settings(precision="bf16-o2")
    offered = [
        (each, after) for each in CHEAPEST_FIRST if (after := each.applied(config)) is not None
    ]
    assert {each.name for each, _ in offered} >= {
        "fuse",
        "full checkpointing",
        "8-bit states",
        "stochastic rounding",
    }
    for each, after in offered:
        assert (
            lines(config, after) and each.applied(after) is None
        ) or each.name == "half micro-batches"


@pytest.mark.slow
def test_a_run_says_what_was_planned_and_never_ends_in_it(settings):
    batch = {"input_ids": torch.zeros(4, 128, dtype=torch.int64)}
    assert of_run.planned(settings(), CPU, batch) == {}  # on a CPU nobody asks
    known = of_run.planned(settings(plan="always"), CPU, batch)
    assert known["allocated_bytes"] > 0 and of_run.first_line(known).startswith("Planned: ")
    assert "the process held 1.00 GiB at most" in of_run.last_line(known, 2**30, CPU)
    gpu = known | {"usable_bytes": known["allocated_bytes"] // 2}
    assert of_run.first_line(gpu).count("narrowgauge plan") == 1
    assert of_run.last_line(gpu, known["allocated_bytes"], torch.device("cuda")).endswith("+0.0 %.")
    broken = of_run.planned(settings(plan="always", recipe="auto"), CPU, batch)
    assert broken["reason"] in of_run.first_line(broken) and of_run.last_line(broken, 1, CPU) == ""
    strange = of_run.planned(settings(plan="always"), CPU, {"input_ids": torch.zeros(())})
    assert "ValueError" in of_run.first_line(strange)


@pytest.mark.slow
def test_ranks_divide_what_they_share(settings):
    """Eight shards of a model whose weights, gradients and states are most of it need less than two, and copies save nothing."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "heads": 8,
        "kv_heads": 8,
        "precision": "bf16-o2",
        "batch_size": 8,
    }
    one, copies, two, eight = (
        Counts(cpu_facts()).of(settings(**sizes, parallel=parallel, micro_batches=8 // ranks))
        for parallel, ranks in (("", 1), ("dp=2", 2), ("fsdp=2", 2), ("fsdp=8", 8))
    )
    assert copies.allocated == pytest.approx(one.allocated, rel=0.02)
    assert one.allocated > two.allocated > eight.allocated > one.allocated / 8
    assert eight.parts()["states"] == pytest.approx(one.parts()["states"] / 8, rel=0.01)
    assert eight.allocated_error > one.allocated_error and any(
        "estimate" in note for note in eight.notes
    )


def test_the_schedule_of_a_pipeline_is_nothing_to_a_run_without_one(settings, monkeypatch):
    """GPipe keeps all micro-batches of its stages; without stages, each is gone before the next."""
    traced = of(moment("head", weights=10 * MIB, saved=7 * MIB))
    monkeypatch.setattr(Counts, "_of_one", lambda *given: traced)
    plain, pipelined = (
        Counts(cpu_facts()).of(settings(parallel="fsdp=2", micro_batches=2, schedule=schedule))
        for schedule in ("1F1B", "GPipe")
    )
    assert plain.parts()["saved"] == 7 * MIB and pipelined.moments == plain.moments


def test_entries_belong_to_their_question(own_cache):
    cache.store({"a": 1}, {"b": 2})
    assert cache.load({"a": 1}) == {"b": 2} and cache.load({"a": 2}) is None
    entry = next(own_cache.glob("*.json"))
    entry.write_text(entry.read_text().replace('"b": 2', '"b": 3'))
    assert cache.load({"a": 1}) is None


@pytest.mark.slow
def test_auto_is_refused(settings):
    with raises(ConfigError, "plan.auto-recipe"):
        Counts(cpu_facts()).of(settings(recipe="auto"))
