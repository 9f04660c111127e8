"""Whole runs on a CPU: what they write, what they refuse, and how they end (exact, unless a test says otherwise)."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge import recipes
from narrowgauge.cli import main
from narrowgauge.conversion import suspended
from narrowgauge.diagnose import machine
from narrowgauge.diagnose.lineage import compare
from narrowgauge.errors import ConfigError, DataError, NumericsError, OutOfMemoryError, StorageError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import Device
from narrowgauge.optim import PRECISIONS
from narrowgauge.report import page
from narrowgauge.report.groups import identity
from narrowgauge.report.run_data import read_alone
from narrowgauge.train import assembly, device, loop, one_run
from narrowgauge.train import trainer as trainer_module
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import replace
from tests.compare import assert_same
from tests.processes import PYTHON, ROOT
from tests.raising import coded, raises, require
from tests.selection import quick
from tests.train import tiny


@pytest.fixture(scope="module")
def full(text, tmp_path_factory):
    """A run with everything switched on, and its reference."""
    output = tmp_path_factory.mktemp("full") / "run"
    config = tiny.settings(
        text, output, recipe="fp8-delayed", compare="bf16", eval_every=2, eval_wide=True, tensor_every=3, sample_tokens=4,
        checkpoint_every=2, layers_recipe={"model.layers.0.mlp.down_proj": "mxfp8"},
    )  # fmt: skip
    assert loop.run(config) == 0
    return config


@pytest.fixture
def installed(monkeypatch):
    """installed(do): calls do(model) on each model that a run builds."""

    def install(do):
        real = assembly.build

        def build(*arguments):
            model = real(*arguments)
            do(model)
            return model

        monkeypatch.setattr(assembly, "build", build)

    return install


# --- what a run writes ----------------------------------------------------------------------------------------------------


def test_metrics_follow_the_contract(full):
    folder = Path(full.output)
    steps = tiny.events(folder, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    keys = {
        "event",
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "elapsed_s",
        "peak_bytes",
    }
    for event in steps:
        assert set(event) == keys and event["tokens"] == 64
        assert event["peak_bytes"] > 2**26, "a process with torch in it"
        assert math.isfinite(event["loss"]) and event["grad_norm"] > 0 and event["tokens_per_s"] > 0
    assert [event["elapsed_s"] for event in steps] == sorted(event["elapsed_s"] for event in steps)
    assert [event["lr"] for event in steps[:2]] == [5e-4, 1e-3]
    assert steps[-1]["lr"] == pytest.approx(1e-3 * (1 + math.cos(0.8 * math.pi)) / 2, rel=1e-12)
    assert [event["step"] for event in tiny.events(folder, "eval")] == [2, 4, 6]
    assert all(
        set(event) == {"event", "step", "loss", "tokens", "wide", "elapsed_s"}
        for event in tiny.events(folder, "eval")
    )
    assert all(event["tokens"] == 128 for event in tiny.events(folder, "eval"))
    assert [event["path"] for event in tiny.events(folder, "checkpoint")] == [
        f"checkpoints/step-{step:08}" for step in (2, 4, 6)
    ]
    assert len(tiny.events(folder, "sample")) == 3 and tiny.events(folder, "sample")[0]["prompt"]
    assert tiny.events(folder, "done") == [
        {"event": "done", "step": 6, "reason": "finished", "exit_code": 0}
    ]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


def test_losses_start_at_the_uniform_guess_and_fall(full):
    losses = tiny.losses(Path(full.output))
    assert losses[1] == pytest.approx(math.log(304), abs=0.1) and losses[6] < losses[1]


def test_run_json_follows_the_contract(full):
    run = json.loads(Path(full.output, "run.json").read_text("utf-8"))
    assert set(run) == {
        "narrowgauge", "torch", "python", "device", "device_type", "threads",
        "started_at", "command", "resumed", "seed", "recipe", "recipes", "precision",
        "switches", "parameters", "model", "data", "tokens_per_step", "steps", "describe", "loss", "memory",
        "task", "best", "auto", "fused", "weight_casts", "parallel", "ranks", "float32", "freed_memory",
        "left_out", "embedding_codes", "trivial", "loss_unit", "f1_over", "coverage", "attention",
    }  # fmt: skip
    # As counted by hand: both blocks' Linears in 8 bits, the head and attention in 16.
    linears, head, attention = 2 * (4 * 32 * 32 + 3 * 32 * 48), 32 * 304, 2 * 2 * 16 * 32
    share = linears / (linears + head + attention)
    assert run["coverage"]["narrow"] == {"8": pytest.approx(share)}
    assert run["coverage"]["sentence"].startswith(f"{100 * share:.0f} % of matrix-product operati")
    assert (run["recipe"], run["precision"], run["steps"], run["tokens_per_step"]) == (
        "fp8-delayed",
        "amp-bf16",
        6,
        64,
    )
    assert {"name", "hidden_size", "layers", "heads", "vocab_size"} <= set(run["model"])
    assert {"source", "documents", "train_tokens", "validation_tokens", "unigram_entropy"} <= set(
        run["data"]
    )
    assert run["started_at"].endswith("+00:00") and run["parameters"] > 30_000
    chosen = {row["name"]: row["recipe"] for row in run["describe"]}
    assert len(chosen) == 15 and chosen["model.layers.0.mlp.down_proj"] == "mxfp8"
    assert (
        chosen["model.layers.0.mlp.up_proj"] == "fp8-delayed" and chosen["lm_head"] != "fp8-delayed"
    )
    assert all(isinstance(value, str) for row in run["describe"] for value in row.values())


def test_a_reference_without_a_recipe_is_torchs_model(make, capsys, with_report):
    """It has no kernels of ours either, and the time of both to one loss is told."""
    config = make("int8", compare="none", fuse=True, steps=3, layers=1, eval_every=1)
    assert loop.run(config) == 0
    told = capsys.readouterr().err
    fused, plain = (
        json.loads((Path(config.output) / part / "run.json").read_text())["fused"]
        for part in ("", "compare-none")
    )
    assert fused and not plain
    gain = page.gain(Path(config.output))
    assert gain and gain in told


@pytest.mark.parametrize("bf16_gemm", [True, False])
def test_plain_torch_trains_in_float32_where_bf16_is_emulated(make, device_is, bf16_gemm):
    """There nobody would train under autocast. Any other reference, or precision, stays as it is."""
    device_is(Device("cpu", bf16_gemm=bf16_gemm))
    cpu, plain = torch.device("cpu"), make("int8", compare="none")
    own = plain.precision
    assert loop.reference_precision(plain, cpu) == (own if bf16_gemm else "fp32")
    assert loop.reference_precision(plain, torch.device("cuda")) == own
    assert loop.reference_precision(make("int8", compare="bf16"), cpu) == own


@pytest.mark.slow
def test_the_peak_of_the_reference_is_its_own(make, installed, monkeypatch, with_report):
    """The first run fills 128 MiB while it is built. A system that tells one peak of a process leaves the second out."""
    fills = [2**25, 0, 2**25, 0]
    installed(lambda model: torch.ones(fills.pop(0)).sum())

    def peaks(name):
        config = make(name, compare="bf16", steps=1, layers=1)
        assert loop.run(config) == 0
        folder = Path(config.output)
        run, reference = (
            tiny.events(each, "step")[-1]["peak_bytes"]
            for each in (folder, folder / "compare-bf16")
        )
        return run, reference, (folder / "report.html").read_text("utf-8")

    if device.reset_peak(torch.device("cpu")):
        run, reference, page = peaks("reset")
        assert reference < run - 2**26 and "of bf16 was" not in page and "no ratio" in page
    monkeypatch.setattr(device, "CLEAR_REFS", Path("/proc/there/is/none"))
    run, reference, page = peaks("whole")
    assert run and not reference and "of bf16 was not measured" in page


def test_the_reference_sees_the_same_batches(full):
    ours, reference = Path(full.output), Path(full.output, "compare-bf16")
    # The same weights and batch: the first losses differ by the rounding of the products alone, 2**-4 of 0.02-sized logits.
    assert tiny.losses(reference)[1] == pytest.approx(tiny.losses(ours)[1], abs=2e-3)
    assert list(tiny.losses(reference)) == list(tiny.losses(ours)) and tiny.losses(
        reference
    ) != tiny.losses(ours)
    run = json.loads((reference / "run.json").read_text("utf-8"))
    assert run["recipe"] == "bf16" and {row["recipe"] for row in run["describe"]} <= {
        "bf16",
        "none",
    }
    assert (reference / "final" / "model.safetensors").exists()
    page = (ours / "report.html").read_text("utf-8")
    assert "fp8-delayed" in page and "bf16" in page


def test_the_chosen_tensors_are_logged(full):
    seen = {
        (event["step"], event["module"], event["role"])
        for event in tiny.events(Path(full.output), "tensor")
    }
    modules = {module for _, module, _ in seen}
    assert len(modules) == 3 and "model.layers.0.self_attn.q_proj" in modules
    assert seen == {
        (step, module, role) for step in (3, 6) for module in modules for role in ("x", "w", "gy")
    }


@pytest.mark.parametrize(
    "recipe",
    quick(["fp8-delayed", "fp8-block"], ["fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "int8"]),
)
def test_tensor_events_are_the_statistics_of_the_tensors(make, before_step, recipe):
    """The weight, which the test sees too: every number of its event, with scales spread by the test's own loop."""
    from narrowgauge.diagnose.statistics import tensor_statistics
    from narrowgauge.ops.quantize import quantize, tile_amax
    from narrowgauge.scaling import WHOLE

    config = make(recipe=recipe, steps=1, tensor_every=1, layers=1)
    weights = {}
    before_step(
        1,
        lambda trainer: weights.update(
            {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        ),
    )
    assert loop.run(config) == 0
    events = [event for event in tiny.events(Path(config.output), "tensor") if event["role"] == "w"]
    assert len(events) == 3
    for event in events:
        weight = weights[event["module"] + ".weight"]
        cast = recipes.get(recipe).output.rhs
        amax = tile_amax(weight, (WHOLE, WHOLE)) if recipe == "fp8-delayed" else None
        scales = quantize(weight, cast, amax=amax).full_scale()
        rows, columns = (
            n if t == WHOLE else t for n, t in zip(weight.shape, cast.tile, strict=True)
        )
        spread = torch.empty_like(weight)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                spread[i, j] = scales[i // rows, j // columns]
        expected = tensor_statistics(weight, cast.format.max, cast.format.smallest, spread)
        assert {key: event[key] for key in expected} == expected
        assert event["scale"] == float(scales.max()) and event["format"] == cast.format.name


@pytest.mark.parametrize(
    ("recipe", "precision"),
    quick(
        ["fp8-delayed"],
        [("fp8-delayed", "amp-bf16"), ("mxfp8", "bf16-o3"), ("int4-hq-lss", "amp-bf16")],
    ),
)
def test_looking_changes_nothing(make, recipe, precision):
    """Evaluation, samples, statistics and checkpoints at every step, or none of them: the same run, bit for bit."""
    common = {"recipe": recipe, "precision": precision, "micro_batches": 2, "steps": 3, "layers": 1}
    quiet = make("quiet", **common)
    watched = make(
        "watched",
        eval_every=1,
        eval_wide=True,
        sample_tokens=2,
        tensor_every=1,
        checkpoint_every=1,
        **common,
    )
    assert loop.run(quiet) == loop.run(watched) == 0
    assert tiny.losses(Path(quiet.output)) == tiny.losses(Path(watched.output))
    assert tiny.digests(Path(quiet.output)) == tiny.digests(Path(watched.output))


# --- the exported model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["amp-bf16", "bf16-o2"])
def test_final_is_the_trained_model(make, monkeypatch, precision):
    models = []
    real = one_run.export
    monkeypatch.setattr(
        one_run, "export", lambda model, *rest: (models.append(model), real(model, *rest))
    )
    config = make(recipe="fp8-delayed", precision=precision, steps=2, layers=1)
    assert loop.run(config) == 0
    [exported] = models
    final = Path(config.output, "final")
    saved = json.loads((final / "config.json").read_text("utf-8"))
    assert saved["use_cache"] is True and "narrowgauge" not in json.dumps(saved)
    assert sorted(path.name for path in final.parent.iterdir() if "final" in path.name) == ["final"]
    assert len({path.stat().st_mode for path in final.iterdir()}) == 1, (
        "who may read one file may read all"
    )
    # Left to itself transformers rounds norms that were kept in float32 to the type of the others.
    model, info = AutoModelForCausalLM.from_pretrained(
        final, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    PRECISIONS[precision].prepare(model)
    for name, parameter in exported.named_parameters():
        assert_same(dict(model.named_parameters())[name].data, parameter.data)
    for name, buffer in model.named_buffers():
        assert_same(dict(exported.named_buffers())[name], buffer)
    tokenizer = AutoTokenizer.from_pretrained(final)
    ids = tokenizer("the narrow scale rounds", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "the narrow scale rounds"
    assert len(tokenizer) == 300
    with torch.no_grad(), suspended(exported.eval()):
        exported.set_attn_implementation(model.config._attn_implementation)
        for kept in (layer for layer in exported.modules() if isinstance(layer, QLinear)):
            assert kept.is_suspended
        assert_same(model.eval()(ids).logits, exported(ids).logits)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]


def test_run_json_says_what_layers_do_at_the_end(make):
    """Which products sample their rows is decided on the way."""
    config = make("sampled", recipe="int4-hq-lss", steps=2, layers=1)
    assert loop.run(config) == 0
    run = json.loads(Path(config.output, "run.json").read_text("utf-8"))
    said = [row["note"] for row in run["describe"] if row["recipe"] == "int4-hq-lss"]
    assert said and all("relative variance" in each and "so far" not in each for each in said)
    other = make(
        "wide", recipe="bf16", steps=2, layers=1
    )  # learned steps do not make another model of it
    assert loop.run(other) == 0
    compare([other.output, config.output])
    ours, theirs = (identity(read_alone(Path(each.output))) for each in (config, other))
    assert ours == theirs


def test_training_goes_on_from_final(full, make):
    config = make("tuned", model=str(Path(full.output, "final")), steps=2, vocab_size=4096)
    assert loop.run(config) == 0
    before, after = tiny.losses(Path(full.output)), tiny.losses(Path(config.output))
    assert after[1] < before[1]
    run = json.loads(Path(config.output, "run.json").read_text("utf-8"))
    assert run["model"]["hidden_size"] == 32 and run["data"]["vocab_size"] == 300


def test_from_scratch_takes_the_sizes_alone(full, make):
    config = make(
        "scratch",
        model=str(Path(full.output, "final")),
        from_scratch=True,
        steps=1,
        vocab_size=4096,
    )
    assert loop.run(config) == 0
    assert tiny.losses(Path(config.output))[1] == pytest.approx(math.log(304), abs=0.1)


@pytest.fixture
def model_folder(full, tmp_path):
    return Path(shutil.copytree(Path(full.output, "final"), tmp_path / "model"))


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all!")


def _fewer_weights(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _other_shapes(folder):
    sizes = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(
        json.dumps(sizes | {"intermediate_size": 64}), encoding="utf-8"
    )


def _config_no_json(folder):
    (folder / "config.json").write_text("{", encoding="utf-8")


def _unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "nothing-of-ours"}', encoding="utf-8")


def _no_config(folder):
    (folder / "config.json").unlink()


def _pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "spoil",
    [
        _no_weights, _damaged_weights, _fewer_weights, _other_shapes, _config_no_json, _unknown_type, _no_config, _pickled,
    ],
    ids=lambda spoil: spoil.__name__,
)  # fmt: skip
def test_bad_model_folders_are_errors_in_words(model_folder, make, spoil):
    spoil(model_folder)
    with pytest.raises((ConfigError, DataError), match=r"(?s)model.*\. .*Pass a ") as caught:
        loop.run(make(model=str(model_folder), steps=1, vocab_size=4096))
    assert caught.value.exit_code in (2, 3)


def test_a_missing_model_folder(make, tmp_path):
    with raises(DataError, "tokenizer.no-folder"):
        loop.run(make(model=str(tmp_path / "nowhere"), vocab_size=4096))


def test_a_sequence_longer_than_the_model_knows(model_folder, make):
    with raises(
        ConfigError, "model.positions", "model.sequence_length = 32", "LlamaForCausalLM", "to 16"
    ):
        loop.run(make(model=str(model_folder), sequence_length=32, vocab_size=4096))


def test_a_tokenizer_larger_than_the_model(model_folder, make, text, tmp_path):
    from narrowgauge.data import documents, train_bpe

    trained = train_bpe((each.text for each in documents(str(text))), 257 + 60, tmp_path)
    if len(trained.tokenizer) <= 304:
        sizes = json.loads((model_folder / "config.json").read_text("utf-8"))
        (model_folder / "config.json").write_text(
            json.dumps(sizes | {"vocab_size": 256}), encoding="utf-8"
        )
    config = make(
        model=str(model_folder), tokenizer=str(trained.folder), from_scratch=True, vocab_size=4096
    )
    with raises(DataError, "model.vocabulary"):
        loop.run(config)


# --- what is refused before anything is done ------------------------------------------------------------------------------


def test_cuda_where_there_is_none(make, text, capfd, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with raises(ConfigError, "device.missing", "device = 'cuda'", "--device") as caught:
        loop.run(make(device="cuda"))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()
    assert main(["train", *tiny.flags(make(device="cuda:3"), text)]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_second_run_in_the_same_folder(full):
    before = Path(full.output, "metrics.jsonl").read_bytes()
    with raises(ConfigError, "run.exists", "--resume"):
        loop.run(full)
    assert Path(full.output, "metrics.jsonl").read_bytes() == before


def test_compile_without_a_compiler(make, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with raises(ConfigError, "compile.no-compiler", "C++", "cpu", "--device.compile"):
        loop.run(make(compile=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_compile_without_a_compiler_from_a_shell(make, text, tmp_path):
    import subprocess

    done = subprocess.run(
        [PYTHON, "-m", "narrowgauge", "train", *tiny.flags(make(), text), "--device.compile"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=ROOT, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "narrowgauge: --device.compile: torch.compile needs a C++ compiler on cpu, and there is none."
        in done.stderr
    )


@pytest.mark.slow
# Torch._dynamo, of its own making.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(machine.cpp_compiler() is None, reason="torch.compile needs a C++ compiler")
def test_compiled_steps_are_those_of_eager_mode(make, monkeypatch):
    """Forward, backward and evaluation as traced graphs, without the generated code, whose compilation takes minutes.

    tests/nn/test_linear.py compares the generated code of Linears with eager mode.
    """
    calls, real = [], torch.compile

    def traced(model):
        calls.append(model)
        return real(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    eager, compiled = (
        make("eager", steps=2, layers=1),
        make("compiled", steps=2, layers=1, compile=True, tensor_every=1),
    )
    assert loop.run(eager) == loop.run(compiled) == 0
    left, right = tiny.losses(Path(eager.output)), tiny.losses(Path(compiled.output))
    assert len(calls) == 1
    # Decomposed bfloat16 arithmetic may round elsewhere, and an fp8 code flip by it: 2**-9 of a loss of 5.8.
    assert right[1] == pytest.approx(left[1], abs=0.012) and right[2] == pytest.approx(
        left[2], abs=0.012
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [(1, coded("corpus.no-tokens")), (0, coded("source.holds-no-text"))],
    ids=["one word", "nothing"],
)
def test_data_that_are_too_little(make, tmp_path, lines, words):
    path = tmp_path / "little.txt"
    path.write_text("narrow\n" * lines, encoding="utf-8")
    with raises(DataError, words) as caught:
        loop.run(make(data=str(path)))
    assert caught.value.exit_code == 3 and str(caught.value).endswith(".")


def test_validation_shorter_than_a_sequence(make, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the tile rounds a scale\n" * 12, encoding="utf-8")
    config = make(
        data=str(path), validation_fraction=0.05, sequence_length=32, steps=1, sample_tokens=2
    )
    assert loop.run(config) == 0
    [event] = tiny.events(Path(config.output), "eval")
    assert 0 < event["tokens"] < 32 and math.isfinite(event["loss"])


# --- numbers that are not finite ------------------------------------------------------------------------------------------


def spoiled(tensor, bad):
    tensor = tensor.clone()
    tensor.view(-1)[5] = bad
    return tensor


class Poison:
    """Spoils what passes a module from its third forward pass in training on: step 3 and its repetition."""

    def __init__(self, bad, first=3, last=10**9):
        self.bad, self.first, self.last, self.calls = bad, first, last, 0

    def active(self):
        return self.first <= self.calls <= self.last

    def output(self, module, inputs, output):
        self.calls += module.training
        return spoiled(output, self.bad) if self.active() else output

    def operand(self, module, inputs):
        self.calls += module.training
        return (spoiled(inputs[0], self.bad),) if self.active() else inputs

    def backward(self, module, inputs, output):
        self.calls += module.training
        if self.active():
            output.register_hook(lambda gradient: spoiled(gradient, self.bad))

    def count(self, module, inputs):
        self.calls += module.training

    def gradient(self, gradient):
        return spoiled(gradient, self.bad) if self.active() else gradient


NORM, UP = "model.layers.1.post_attention_layernorm", "model.layers.1.mlp.up_proj"


def in_forward(model, poison):
    model.get_submodule(NORM).register_forward_hook(poison.output)


def in_backward(model, poison):
    model.get_submodule(UP).register_forward_hook(poison.backward)


def in_operand(model, poison):
    model.get_submodule(UP).register_forward_pre_hook(poison.operand)


def in_weight_gradient(model, poison):
    model.get_submodule(UP).register_forward_pre_hook(poison.count)
    model.get_submodule(UP).weight.register_hook(poison.gradient)


CASES = [
    (in_forward, math.nan, f"module {NORM!r} (LlamaRMSNorm), the output was not finite"),
    (in_forward, math.inf, f"module {NORM!r} (LlamaRMSNorm), the output was not finite"),
    (
        in_backward,
        math.nan,
        f"module {UP!r}, product grad_input: the gradient gy of its output was not finite",
    ),
    (in_operand, math.inf, f"module {UP!r}, product output: the input x was not finite"),
    (
        in_weight_gradient,
        math.nan,
        f"module {UP!r} (QLinear), product grad_weight: the result was not finite",
    ),
]


@pytest.mark.parametrize(
    ("where", "bad", "words"), CASES, ids=lambda value: getattr(value, "__name__", str(value)[:8])
)
@pytest.mark.parametrize("recipe", quick(["fp8-delayed"], ["fp8-delayed", "mxfp8"]))
def test_a_step_that_is_not_finite_ends_the_run(
    make, installed, reports, recipe, where, bad, words
):
    config = make(recipe=recipe, checkpoint_every=1, micro_batches=1)
    models = []
    installed(lambda model: (models.append(model), where(model, Poison(bad))))
    with pytest.raises(NumericsError) as caught:
        loop.run(config)
    assert caught.value.exit_code == 5
    message = str(caught.value)
    assert (
        message.startswith("step 3: loss ")
        and words in message
        and caught.value.code == "loss.not-finite"
    )
    folder = Path(config.output)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000001",
        "step-00000002",
    ]
    found, _ = store.newest_valid(folder / "checkpoints")
    for name, parameter in models[0].named_parameters():
        assert_same(parameter.data, found.tensors["weights"][name])
        assert parameter.grad is None
    [event] = tiny.events(folder, "nonfinite")
    assert event == {"event": "nonfinite", "step": 3, "where": words}
    [done] = tiny.events(folder, "done")
    assert done == {"event": "done", "step": 2, "reason": "nonfinite", "exit_code": 5}
    last = tiny.events(folder, "step")[-1]
    assert last["step"] == 3 and not (
        math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"])
    )
    assert reports == [folder]


def test_squares_of_gradients_beyond_float32_are_clipped_and_the_run_goes_on(make, installed):
    config = make(recipe="fp8-current", micro_batches=1, clip=1.0)

    def enlarge(model):
        model.get_submodule(UP).weight.register_hook(lambda gradient: gradient * 0 + 1e20)

    installed(enlarge)
    assert loop.run(config) == 0
    elements = sum(
        event["grad_norm"] > 1e20 and math.isfinite(event["grad_norm"])
        for event in tiny.events(Path(config.output), "step")
    )
    assert elements == config.steps


def test_the_bad_micro_batch_need_not_be_the_first(make, installed):
    # The last of step 3; the repetition has it first.
    installed(lambda model: in_operand(model, Poison(math.inf, first=12)))
    with raises(NumericsError, "loss.not-finite", UP):
        loop.run(make(micro_batches=4))


def test_float16_skips_a_step_that_overflows(make, installed):
    config = make(precision="amp-fp16", steps=5, checkpoint_every=1, keep=9)
    installed(lambda model: in_weight_gradient(model, Poison(math.inf, first=3, last=3)))
    assert loop.run(config) == 0
    folder = Path(config.output)
    assert not tiny.events(folder, "nonfinite") and list(tiny.losses(folder)) == [1, 2, 3, 4, 5]
    before, skipped, after = (
        store.load(folder / "checkpoints" / f"step-{step:08}") for step in (2, 3, 4)
    )
    for group in ("weights", "optimizer"):
        for name, tensor in before.tensors[group].items():
            assert_same(skipped.tensors[group][name], tensor, at=name)
    assert not torch.equal(
        after.tensors["weights"]["lm_head.weight"], before.tensors["weights"]["lm_head.weight"]
    )
    scales = [each.facts["state"]["scaler"]["scale"] for each in (before, skipped, after)]
    assert scales[1] == scales[0] / 2 == scales[2]
    assert [each.facts["skipped_steps"] for each in (before, skipped, after)] == [0, 1, 0]


def test_float16_gives_up_when_no_loss_scale_helps(make, installed, monkeypatch):
    monkeypatch.setattr(trainer_module, "MOST_SKIPPED_STEPS", 2)
    installed(lambda model: in_weight_gradient(model, Poison(math.inf, first=2)))
    config = make(precision="amp-fp16")
    with raises(NumericsError, "loss.not-finite", UP):
        loop.run(config)
    assert list(tiny.losses(Path(config.output))) == [1, 2, 3, 4]


def test_float16_does_not_skip_a_loss_that_is_not_finite(make, installed):
    installed(lambda model: in_forward(model, Poison(math.nan)))
    with raises(NumericsError, "loss.not-finite", NORM):
        loop.run(make(precision="amp-fp16"))


@pytest.mark.slow
def test_a_reference_that_fails_leaves_the_report_of_both(make, installed, with_report):
    config = make(recipe="mxfp8", compare="bf16", steps=3)
    models = []
    installed(
        lambda model: (
            models.append(1),
            in_forward(model, Poison(math.nan)) if len(models) == 2 else None,
        )
    )
    with raises(NumericsError, "loss.not-finite", "step 3"):
        loop.run(config)
    folder = Path(config.output)
    assert tiny.events(folder, "done")[0]["reason"] == "finished"
    assert tiny.events(folder / "compare-bf16", "done")[0]["reason"] == "nonfinite"
    assert (folder / "final").exists() and (folder / "report.html").exists()


# --- the end of the disk and of memory ------------------------------------------------------------------------------------


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_rust(*arguments, **options):
    from safetensors import SafetensorError

    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


@pytest.mark.parametrize("refuse", [full_disk, full_disk_in_rust])
def test_a_disk_that_is_full_at_the_export(make, monkeypatch, reports, refuse):
    from transformers import PreTrainedModel

    config = make(steps=2, layers=1)
    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedModel, "save_pretrained", refuse)
        with raises(StorageError, "storage.refused", "write") as caught:
            loop.run(config)
    assert caught.value.exit_code == 8
    folder = Path(config.output)
    assert store.newest_valid(folder / "checkpoints")[0].step == 2
    assert not [path for path in folder.iterdir() if "final" in path.name]
    assert loop.run(replace(config, resume=True)) == 0
    assert (folder / "final" / "model.safetensors").exists() and reports == [folder]


def test_an_export_that_fails_leaves_the_older_one(make, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    config = make(steps=2, layers=1)
    loop.run(config)
    weights = Path(config.output, "final", "model.safetensors")
    before = weights.read_bytes()
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full_disk)
    with pytest.raises(StorageError):
        loop.run(replace(config, steps=3, resume=True))
    assert weights.read_bytes() == before
    assert not [path.name for path in weights.parent.parent.iterdir() if path.name.startswith(".")]


def test_a_disk_that_is_full_at_the_report(make, monkeypatch, with_report):
    config = make(steps=2, layers=1)
    monkeypatch.setattr(loop.page, "write", full_disk)
    with raises(StorageError, "storage.refused", "write"):
        loop.run(config)
    folder = Path(config.output)
    assert store.newest_valid(folder / "checkpoints")[0].step == 2 and (folder / "final").is_dir()


def test_a_report_that_cannot_be_written_does_not_hide_a_numerics_error(
    make, installed, monkeypatch, with_report
):
    installed(lambda model: in_forward(model, Poison(math.nan)))
    monkeypatch.setattr(loop.page, "write", full_disk)
    with raises(NumericsError, "loss.not-finite", "step 3") as caught:
        loop.run(make())
    [note] = caught.value.__notes__
    require(note, "report.not-written", "No space left")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.\nmore"
        ),
    ],
)
def test_memory_that_does_not_suffice(make, before_step, error):
    def fail(trainer):
        raise error

    config = make(steps=3, checkpoint_every=1)
    before_step(3, fail)
    with raises(
        OutOfMemoryError, "memory.device", "cpu", "batch.micro_batches", "batch.size"
    ) as caught:
        loop.run(config)
    assert caught.value.exit_code == 9
    assert store.newest_valid(Path(config.output, "checkpoints"))[0].step == 2


def test_an_error_of_ours_stays_what_it_is(make, before_step):
    def fail(trainer):
        raise RuntimeError("a bug")

    before_step(1, fail)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        loop.run(make(steps=1))


def test_a_second_interrupt_stops_at_once(make, before_step, text, capfd):
    config = make(steps=3)

    def twice(trainer):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before_step(2, twice)
    assert main(["train", *tiny.flags(config, text)]) == 130
    assert not Path(config.output, "checkpoints").exists()
    assert "Traceback" not in capfd.readouterr().err
