"""What a report consists of: its jobs and their limits, the command, and the page (exact, in words)."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from narrowgauge import cli
from narrowgauge.errors import ConfigError, StorageError
from narrowgauge.lab import card
from narrowgauge.lab.card import (
    archive,
    checks,
    conditions,
    contenders,
    page,
    steps,
    timings,
    two_cards,
)
from narrowgauge.lab.card.process import PASS, NotHere, judged
from narrowgauge.ops.registry import Device
from tests.lab.card.reports import MACHINE
from tests.lab.card.stand_in import MACHINE as PLAYED
from tests.ops.registries import registries
from tests.raising import raises

HOPPER, BLACKWELL, ADA = (Device("cuda", each, cuda=(13, 0)) for each in ((9, 0), (10, 0), (8, 9)))
SETTINGS = card.CardSettings()
OPS = (
    "quantize_pair", "quantize_rotated", "mm", "quantize_precast", "quantize", "optim", "rotary", "rotate_and_encode", "norm_act",
    "norm_act_backward", "attention", "grouped",
)  # fmt: skip


def told(at: str) -> None:
    """Where a job says how far it is."""


@pytest.fixture(scope="module")
def jobs():
    return {name: card.all_jobs(device, 2, SETTINGS) for name, device in (("H100", HOPPER), ("B200", BLACKWELL))}  # fmt: skip


def test_every_operator_with_a_kernel_for_a_gpu_is_checked():
    there = {each.op for each in registries() if any(kernel.check for kernel in each.kernels)}
    assert there == set(checks.registries()) == set(OPS)


def test_every_job_has_a_limit_and_a_name_of_its_own(jobs):
    for found in jobs.values():
        assert all(0 < job.limit_s <= 180 for job in found)
        assert len({job.name for job in found}) == len(found)
        for job in found:
            module, _, name = job.run.partition(":")
            assert callable(getattr(importlib.import_module(module), name))
            assert job.alone == (job.part != "checks")
    assert MACHINE.limit_s and card.MACHINE.limit_s and checks.PROBE_S and conditions.SMI_S


def test_each_kernel_and_form_has_a_job_on_the_cards_that_run_it(jobs):
    """All examples of all checks, but for kernels that are made for other operands."""
    names = {card: {job.name for job in found} for card, found in jobs.items()}
    for op, registry in checks.registries().items():
        triton = next(kernel for kernel in registry.kernels if kernel.check is not None)
        own = [name for name in names["H100"] if name.startswith(f"{op}, {triton.name}: ")]
        assert len(own) == sum(
            (refusal := triton.refuse(_on(spec, HOPPER))) is None
            or refusal.code not in ("operands", "device")
            for spec in triton.check().examples()
        ), op
    blackwell = {name for name in names["B200"] if name.startswith("mm, native-mx")}
    assert len(blackwell) >= 4
    assert "Linear 4096 to 4096, nvfp4" in names["B200"] - names["H100"]
    assert {"all-reduce beside a Linear, fp8-row", "8B-shaped step, compiled, fp8-block"} <= names["H100"]  # fmt: skip


def _on(spec, device):
    from dataclasses import replace

    return replace(spec, device=device)


def test_large_samples_pass_for_the_definition():
    """The comparisons of the full grid are true of the definition itself, for one form of the cheapest operators."""
    from narrowgauge.ops import rotary, selfcheck

    found = selfcheck.examine(
        "rotary", rotary.reference, rotary.CHECK, ((torch.bfloat16,) * 4, 8), torch.device("cpu"), large=True,
    )  # fmt: skip
    assert found.reason is None and not found.raised


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["quantize_pair", "mm", "optim", "rotate_and_encode", "norm_act_backward"]
)
def test_large_samples_pass_for_every_definition(op):
    from narrowgauge.ops import selfcheck
    from tests.lab.card.stand_in import _run_of

    registry = checks.registries()[op]
    check = next(kernel.check() for kernel in registry.kernels if kernel.check is not None)
    spec = next(iter(check.examples()))
    run = _run_of(registry.kernels[-1])
    found = selfcheck.examine(op, run, check, check.kind(spec), torch.device("cpu"), large=True)
    assert found.reason is None, found.reason


def test_without_a_card_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    """One line, exit code 2, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotHere, match=r"torch\.cuda\.is_available"):
        conditions.of_machine(told)
    absent = {"status": "absent", "why": "torch.cuda.is_available() is False: no CUDA"}
    monkeypatch.setattr("narrowgauge.lab.card.runner.Runner.ask", lambda self, job: absent)
    assert cli.main(["card-report"]) == ConfigError.exit_code
    words = capsys.readouterr().err
    assert re.fullmatch(r"narrowgauge: card-report: torch.*nvidia-smi.*narrowgauge info.*\n", words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--only", "check"], "part"), (["--minutes", "0"], "minutes"), (["--limit-s", "-1"], "minutes"),
        (["--read", "a.zip", "--minutes", "3"], "read-options"), (["--read", "nowhere.zip"], ""),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused(arguments, code, monkeypatch, tmp_path):
    from narrowgauge.cli.card_report import card_report

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        cli._call(card_report, "card-report", arguments)
    assert not code or caught.value.code == f"card-report.{code}"


def test_errors_are_judged_by_whether_the_device_still_answers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert judged(RuntimeError("CUDA error: invalid argument"))["status"] == "refused"
    assert judged(ValueError("no such thing"))["status"] == "failed"
    assert judged(NotHere("torchao"))["status"] == "absent"

    def faulty():
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", faulty)
    found = judged(ValueError("no such thing"))
    assert found["status"] == "fault" and "unspecified launch failure" in found["why"]


def test_conditions_are_read_as_nvidia_smi_writes_them():
    found = conditions.parsed("580.65.06, 1980, 2619, 41, 312.55\n")
    assert found == {"driver": "580.65.06", "sm_mhz": 1980.0, "memory_mhz": 2619.0, "temperature_c": 41.0, "power_w": 312.55}  # fmt: skip
    assert conditions.parsed("580, [N/A], 1, 2, 3")["sm_mhz"] is None
    with pytest.raises(ValueError, match="1 of 5"):
        conditions.parsed("No devices were found")


# --- timings, at toy sizes on the CPU ---

TOY = {"hidden": 64, "mlp": 96, "heads": 4, "key_heads": 2, "vocabulary": 128, "layers": 2, "rows": 2, "length": 16}  # fmt: skip


def line(part, arguments, **found):
    name = f"{part} {arguments.get('contender', '')}"
    return {"job": name, "part": part, "status": PASS, "arguments": arguments, "seconds": 1.0, **found}  # fmt: skip


FACTS = {
    "card": PLAYED["card"],
    "versions": {"torch": "2.13.0"}, "started_at": "now", "ended": "finished",
}  # fmt: skip


def test_a_page_has_measurements_beside_predictions(tmp_path):
    """Of a Linear at its real size; of a toy step, whose prediction is traced."""
    sizes = {"tokens": 15_872, "inputs": 4096, "outputs": 16_384}
    kernels = [{"name": "nvjet_qqtst", "count": 3, "seconds": 1e-3}]
    lines = [
        line("linear", {**sizes, "contender": name}, median_s=seconds, error_db=30.0, sm_mhz=1755.0, kernels=kernels)
        for name, seconds in (("bf16", 0.0081), ("fp8-current", 0.0054), ("te-current", 0.0051))
    ]  # fmt: skip
    lines += [
        line("step", {"contender": name, "compiled": False, "sizes": TOY}, median_s=0.5, parts_s={"forward": 0.1}, peak_bytes=1 << 30)
        for name in ("bf16", "fp8-current")
    ]  # fmt: skip
    facts = FACTS
    found = page.page(archive.Report(facts, lines))
    bf16, ours, engine = found["linears"]
    assert (ours["speedup"], engine["speedup"], bf16["speedup"]) == ("1.50", "1.59", "1.00")
    assert engine["predicted_ms"] == "–" and ours["predicted"] == "1.32 to 1.46"
    assert 4 < float(ours["predicted_ms"]) < 8 and ours["off"].endswith(" %")
    assert ours["teraflops"] == f"{6 * 15_872 * 4096 * 16_384 / 0.0054 / 1e12:.0f}"
    assert found["steps"][1]["predicted_ms"] != "–" and found["steps"][1]["peak"] == "1.0"
    text = page.write(archive.Report(facts, lines), tmp_path / "a.html").read_text(encoding="utf-8")
    assert found["notice"]["kind"] == "good" and "nvjet_qqtst" in text and "1755 MHz" in text


def test_a_page_has_the_rates_of_a_card(tmp_path):
    found = line("rates", {}, copy=2e12, bf16=6e14, fp8=None)
    text = page.write(archive.Report(FACTS, [found]), tmp_path / "p.html").read_text("utf-8")
    assert "Copies 2.00 TB/s; BF16 600 TFLOP/s; FP8 without casts refused" in text


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"card": []}, {}),
        ({"versions": ["a"]}, {}),
        ({}, {"kernels": [{}], "median_s": 1.0}),
        ({}, {"median_s": 0}),
        ({}, {"median_s": "x"}),
        ({}, {"seconds": None, "status": "fault"}),
        ({}, {"arguments": None, "median_s": 1.0}),
        ({}, {"arguments": {"tokens": 8}, "median_s": 1.0}),
        ({}, {"median_s": 1.0, "kernels": [{"name": "a", "count": 10**400}]}),
        (
            {},
            {
                "part": "step",
                "arguments": {"contender": "bf16", "compiled": False, "sizes": {"heads": 3}},
                "median_s": 1.0,
            },
        ),
        (
            {},
            {
                "part": "step",
                "arguments": {"contender": "bf16", "compiled": False, "sizes": {"shape": 3}},
                "median_s": 1.0,
            },
        ),
        ({}, {"part": "rates"}),
        ({}, {"part": "communication", "hidden": 0.5}),
        ({}, {"part": "optimizer", "median_s": 1.0, "state_bytes": 8, "parameters": 0}),
    ],
)
def test_facts_of_other_types_are_refused_in_words(facts, found, tmp_path):
    given = line("linear", {"tokens": 8, "inputs": 8, "outputs": 8, "contender": "bf16"}) | found
    with raises(ConfigError, "card-report.damaged"):
        page.write(archive.Report({**FACTS, **facts}, [given]), tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_an_error_of_the_page_is_not_the_archives(tmp_path, monkeypatch):
    report = archive.Report(FACTS, [line("linear", {"contender": "bf16"})])

    def broken(lines):
        raise KeyError("an error of the page")

    monkeypatch.setattr(page, "checks", broken)
    with pytest.raises(KeyError, match="an error of the page"):
        page.write(report, tmp_path / "p.html")
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with raises(StorageError, "storage.refused"):
        page.write(report, tmp_path / "file" / "p.html")


def test_a_report_without_a_card_is_refused_by_the_archives_name(tmp_path):
    archive.write(tmp_path / "a.zip", {"ended": "not yet"}, [])
    with raises(ConfigError, "card-report.damaged", "a.zip", "has no card"):
        card.write_page(tmp_path / "a.zip", None)


@pytest.mark.parametrize("contender", ["bf16", "fp8-delayed"])
def test_timings_run_at_toy_sizes(contender):
    found = timings.linear(told, 64, 32, 48, contender, "cpu")
    assert found["median_s"] > 0 and found["error_db"] > 20 and found["kernels"] and found["backend"]  # fmt: skip
    block = steps.layer(told, contender, False, "cpu", TOY)
    assert block["median_s"] > 0 and len(block["backend"]) == 7
    if contender != "bf16":
        assert all("emulated" in each for each in block["backend"]), "no Linear keeps 16 bits"


@pytest.mark.slow
def test_steps_optimizers_and_two_ranks_run_at_toy_sizes():
    whole = steps.step(told, "fp8-current", False, "cpu", TOY)
    assert whole["loss"] < 6 and len(whole["backend"]) == 15 and "status" not in whole
    for name in ("torch-fused", "8bit", "8bit-stochastic"):
        found = timings.optimizer(told, name, [2, 64, 64], "cpu")
        assert found["parameters"] == 8192 and found["state_bytes"] > 8192
    assert timings.rates(told, "cpu", 64, 4096)["copy"] > 0
    both = two_cards.beside(told, "fp8-current", "cpu", 2, 1024, (32, 32, 64), 2)
    assert both["ranks"] == 2 and both["both_s"] > 0


def test_a_result_far_from_float32_is_wrong(monkeypatch):
    linear = contenders.linear
    monkeypatch.setattr(contenders, "linear", lambda *given: _negated(linear(*given)))
    found = timings.linear(told, 64, 32, 48, "bf16", "cpu")
    assert found["status"] == "wrong" and "-6.0 dB" in found["why"]


def _negated(layer):
    layer.register_forward_hook(lambda module, given, y: -y)
    return layer


def test_what_is_not_here_is_absent():
    with pytest.raises(NotHere, match=r"TransformerEngine .* is not installed"):
        contenders.linear("te-current", torch.nn.Linear(4, 4), 8)
    with pytest.raises(NotHere, match="needs 2 cards, and 1 is here"):
        two_cards.beside(told, "bf16", "cuda", 1)
