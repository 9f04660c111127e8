"""The log of a run: every finished line survives, and a resumed run reads as one (exact)."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.diagnose.runs import decode, encode, read_metrics, read_run
from narrowgauge.errors import ConfigError, StorageError
from narrowgauge.train import console
from narrowgauge.train.metrics import MetricsLog
from tests.processes import PYTHON, ROOT
from tests.raising import raises


def write(path: Path, *events: tuple) -> None:
    with MetricsLog(path) as log:
        for event, step, values in events:
            log.write(event, step, **values)


def test_events_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        ("step", 1, {"loss": 8.5, "tokens": 4096}),
        ("eval", 1, {"loss": 8.25}),
        ("step", 2, {"loss": 8.0}),
    )
    assert read_metrics(path) == [
        {"event": "step", "step": 1, "loss": 8.5, "tokens": 4096},
        {"event": "eval", "step": 1, "loss": 8.25},
        {"event": "step", "step": 2, "loss": 8.0},
    ]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_spike_whose_batch_stays_left_out_is_told_after_a_resumption_before_it(tmp_path):
    """And one that the run comes to again is not told twice."""
    path = tmp_path / "metrics.jsonl"
    spike = (
        ("spike", 9, {"cause": "data", "left_out": [8]}),
        ("rewind", 5, {"steps": 4, "why": "spike"}),
    )
    other = ("spike", 7, {"cause": "format", "left_out": []})
    write(
        path,
        other,
        *spike,
        ("step", 6, {"loss": 8.0}),
        ("resume", 5, {"path": "p", "skipped": [], "left_out": [3, 8]}),
    )
    assert [(event["event"], event["step"]) for event in read_metrics(path)] == [
        ("spike", 9),
        ("rewind", 5),
        ("resume", 5),
    ]
    write(tmp_path / "again.jsonl", *spike, ("resume", 5, {"path": "p", "skipped": []}))
    assert [event["event"] for event in read_metrics(tmp_path / "again.jsonl")] == [
        "rewind",
        "resume",
    ]


def test_two_batches_that_were_left_out_at_one_step_are_told_both(tmp_path):
    """Once a batch is left out the next one takes its step, and may spike there."""
    path, again = tmp_path / "metrics.jsonl", ("rewind", 5, {"steps": 4, "why": "spike"})
    write(
        path,
        *(
            each
            for batch in (9, 10)
            for each in (("spike", 9, {"cause": "data", "left_out": [batch]}), again)
        ),
    )
    assert [event["left_out"] for event in read_metrics(path) if event["event"] == "spike"] == [
        [9],
        [10],
    ]


def test_numbers_that_json_lacks_are_strict_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("step", 1, {"loss": math.nan, "grad_norm": math.inf, "counts": [1, -math.inf]}))
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (raw["loss"], raw["grad_norm"], raw["counts"]) == ("NaN", "Infinity", [1, "-Infinity"])
    event = read_metrics(path)[0]
    assert (
        math.isnan(event["loss"])
        and event["grad_norm"] == math.inf
        and event["counts"] == [1, -math.inf]
    )


def test_text_that_looks_like_a_number_stays_text(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sample = {"prompt": "NaN", "text": "Infinity\n\u2028\ud800é"}
    write(path, ("sample", 1, sample))
    assert {key: read_metrics(path)[0][key] for key in sample} == sample
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().isascii()


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
JSON = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(), JSON), st.text())
def test_decode_undoes_encode(record, text):
    record["text"] = text
    assert decode(encode(record)) == record
    assert "\n" not in encode(record)


@pytest.mark.parametrize(
    "stump", ['{"event": "st', "x", '{"event": "step", "step": 3}', "é" * 100_000, "\0" * 70_000]
)
def test_a_line_cut_by_a_crash_is_passed_over_and_removed(tmp_path, stump):
    path = tmp_path / "metrics.jsonl"
    write(path, ("step", 1, {"loss": 2.0}), ("step", 2, {"loss": 1.0}))
    whole = path.read_bytes()
    path.write_bytes(whole + stump.encode())
    assert [event["step"] for event in read_metrics(path)] == [1, 2]
    write(path, ("step", 3, {"loss": 0.5}))
    assert path.read_bytes().startswith(whole)
    assert [event["step"] for event in read_metrics(path)] == [1, 2, 3]


def test_a_key_that_an_event_does_not_name_may_hold_anything(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("step", 1, {"loss": 2.0, "module": ["a"], "role": {}, "switch": [[]]}))
    assert [event["module"] for event in read_metrics(path)] == [["a"]]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"torn" * 50_000)
    write(path, ("step", 1, {"loss": 1.0}))
    assert len(read_metrics(path)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "[" * 5000,
        '{"event": "step"}',
        '{"step": 1}',
        '{"event": "step", "step": NaN}',
        '{"event": "step", "step": -1, "loss": 1.0}',
        '{"event": "step", "step": 2}',
        '{"event": "stfp", "step": 2, "loss": 1.0}',
        '{"event": "step", "step": 2, "loss": "1.0"}',
        '{"event": "step", "step": 2, "loss": null}',
        '{"event": "step", "step": 1, "loss": 1.0}',
        '{"event": "step", "step": true, "loss": 1.0}',
        '{"event": "eval", "step": 1, "loss": 1.0, "accuracy": 1.5}',
        '{"event": "tensor", "step": 1, "role": "x"}',
    ],
    ids=lambda line: line[:60],
)
def test_a_damaged_line_in_the_midst_is_an_error_with_its_place(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"event": "step", "step": 1, "loss": 2.0}}\n{line}\n{{"event": "step", "step": 2, "loss": 1.0}}\n'
    )
    with raises(ConfigError, "run.event", "jsonl:2"):
        read_metrics(path)


def steps(events: list[dict]) -> list[tuple]:
    return [(event["event"], event["step"], event.get("run")) for event in events]


def test_what_a_resumed_run_repeats_counts_once(tmp_path):
    """Killed at 5 with a checkpoint at 3; resumed, killed at 4; resumed again and so far only at 4."""
    path = tmp_path / "metrics.jsonl"
    write(path, *(("step", step, {"run": 1, "loss": 1.0}) for step in range(1, 6)))
    write(path, ("resume", 3, {"run": 2, "loss": 1.0}), ("step", 4, {"run": 2, "loss": 1.0}))
    assert steps(read_metrics(path)) == [
        ("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("resume", 3, 2), ("step", 4, 2),
    ]  # fmt: skip
    write(path, ("resume", 3, {"run": 3, "loss": 1.0}), ("step", 4, {"run": 3, "loss": 1.0}))
    assert steps(read_metrics(path)) == [
        ("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("resume", 3, 3), ("step", 4, 3),
    ]  # fmt: skip


def test_modules_and_roles_of_a_step_are_told_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    roles = [("up", "x"), ("up", "w"), ("down", "x"), ("up", "x")]
    write(
        path,
        *(("tensor", 5, {"module": m, "role": r, "amax": i}) for i, (m, r) in enumerate(roles)),
    )
    assert [(e["module"], e["role"], e["amax"]) for e in read_metrics(path)] == [
        ("up", "w", 1), ("down", "x", 2), ("up", "x", 3),
    ]  # fmt: skip


def test_every_line_is_there_after_kill_minus_nine(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom narrowgauge.train.metrics import MetricsLog\n"
        f"log = MetricsLog(Path({str(path)!r}))\n"
        "for step in range(1, 10**9):\n  log.write('step', step, loss=1.0)\n  print(step, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [PYTHON, "-c", program], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout
        for _ in range(200):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = 200 + process.stdout.read().count(b"\n")
    assert [event["step"] for event in read_metrics(path)][:told] == list(range(1, told + 1))


def test_a_full_disk_is_a_storage_error_and_the_log_stays_readable(tmp_path):
    path = tmp_path / "metrics.jsonl"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with MetricsLog(path) as log, pytest.raises(StorageError, match="cannot append to"):
            for step in range(1, 1000):
                log.write("step", step, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(read_metrics(path)) > 10
    write(path, ("step", 5000, {"loss": 1.0}))
    assert read_metrics(path)[-1]["step"] == 5000


def test_tensorboard_gets_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard") as log:
        log.write("step", 1, loss=2.0, grad_norm=1.0, lr=0.1, tokens_per_s=5.0, peak_bytes=7)
        log.write("eval", 1, loss=1.5)
        log.write("tensor", 1, amax=1.0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {
        "step/loss", "step/grad_norm", "step/lr", "step/tokens_per_s", "step/peak_bytes", "eval/loss",
    }  # fmt: skip
    assert board.Scalars("eval/loss")[0].value == 1.5


def test_without_tensorboard_the_next_step_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "metrics.no-tensorboard"):
        MetricsLog(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard")


def test_a_missing_or_damaged_run_json_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read: No such file"):
        read_run(tmp_path / "run.json")
    for damaged in (b"{", b"[]", b'{"a": NaN}', b"\xff"):
        (tmp_path / "run.json").write_bytes(damaged)
        with pytest.raises(
            ConfigError, match=r"damaged.*or remove it and continue the run with --resume"
        ):
            read_run(tmp_path / "run.json")


# The console


def test_plain_lines_when_nobody_watches(capsys):
    with console.Console(total_steps=25, log_every=10) as show:
        show.say("fp8-current on cpu")
        for step in range(1, 26):
            show.step(step, loss=8.0 / step, tokens_per_s=1234.5, peak_bytes=3 * 2**29)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["step", "10/25"],
        ["step", "20/25"],
        ["step", "25/25"],
    ]
    assert "loss 0.8000 | 1,234 tokens/s | 1.50 GiB |" in lines[1] and lines[3].endswith(
        "0:00:00 left"
    )


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with console.Console(total_steps=20, log_every=10, start_step=5) as show:
        assert show.bar is not None
        show.say("[not markup] /path")
        show.step(6, loss=float("nan"), tokens_per_s=10.0, peak_bytes=0)
    text = capsys.readouterr().err
    assert "[not markup] /path" in text and "step 6/20" in text and "loss nan" in text


def test_clock_counts_hours():
    assert [console.clock(seconds) for seconds in (0, 59.6, 3661, 360000)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "100:00:00",
    ]
