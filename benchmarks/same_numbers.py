"""Did a change of the Linear leave its numbers alone? Losses, gradients and states of all recipes, bit for bit, here and elsewhere.

    python -m benchmarks.same_numbers --base main                checks `main` out, records there and here, compares
    python -m benchmarks.same_numbers --record numbers.json      records this tree
    python -m benchmarks.same_numbers --against numbers.json     compares this tree with a recording
    ... --only layer                                             one group of cases alone: layer, model, compiled

Recorded is a hash of each tensor, one CPU thread, fixed seeds:

    layer     each recipe, both `save` values, whole, ragged and empty shapes, float32 and bfloat16, some gradients left out, two
              micro-batches a step, `advance`, eval, no_grad, inference mode; with what an observer was shown
    model     a Llama whose q, k, v and gate, up share their inputs: fused or not, autocast, checkpointing, suspended and frozen parts
    compiled  a layer under torch.compile, with one backend that runs what was traced and with Inductor

The file runs against either tree, so it uses what both have. Exit code 0: equal. 1: they differ, with the first that does. 2: a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.recipe import Recipe

Note = Callable[[str, "Tensor | None"], None]

SHAPES = {
    "whole": (32, 64, 48),
    "ragged": (37, 72, 41),
    "tiny": (3, 33, 7),
    "empty": (0, 64, 48),
    "long": (2, 40, 32),
}
STEPS = 3


def recorded(only: str | None) -> dict[str, str]:
    """Name of a number -> hash of its bits."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for group, cases in (("layer", _layers()), ("model", _models()), ("compiled", _compiled())):
        if only not in (None, group):
            continue
        for name, run in cases:
            torch.manual_seed(0)
            run(
                lambda key, tensor, name=f"{group} {name}": found.__setitem__(
                    f"{name}: {key}", _hash(tensor)
                )
            )
            torch.compiler.reset() if group == "compiled" else None
    return found


def _hash(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    tensor = tensor.detach().cpu().contiguous()
    form = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(form + bytes(tensor.reshape(-1).view(torch.uint8).tolist())).hexdigest()[
        :16
    ]


# --- one layer -------------------------------------------------------------------------------------------------------------------


def variants() -> list[Recipe]:
    """Every recipe, and it with the other `save`."""
    found = list(recipes.ALL)
    for recipe in recipes.ALL:
        other = "original" if recipe.save == "quantized" else "quantized"
        rotate = recipe.grad_weight.rotate
        if recipe.grad_weight.rhs is not None and not (
            rotate is not None and rotate.signs == "random"
        ):
            found.append(replace(recipe, save=other, name=f"{recipe.name}-{other}"))
    mixed = recipes.get("int4-hq-bs")
    found.append(mixed.with_gemm(grad_input=recipes.BF16.grad_input))
    found.append(mixed.with_gemm(grad_weight=recipes.BF16.grad_weight))
    found.append(recipes.get("fp8-current").with_gemm(grad_weight=recipes.BF16.grad_weight))
    found.append(recipes.get("fp8-delayed").with_gemm(grad_input=recipes.BF16.grad_input))
    found.append(recipes.get("int8").with_gemm(output=recipes.MXFP8.output))
    eager = recipes.get("int4-hq-lss")
    sample = replace(eager.grad_input.sample, max_variance=float("inf"))
    always = {
        name: replace(getattr(eager, name), sample=sample) for name in ("grad_input", "grad_weight")
    }
    found.append(eager.with_gemm(**always))
    return found


def _layers() -> Iterator[tuple[str, Callable[[Note], None]]]:
    for recipe in variants():
        for shape in SHAPES:
            yield f"{recipe.name} {shape} float32", _layer(recipe, SHAPES[shape], torch.float32)
        yield f"{recipe.name} whole bfloat16", _layer(recipe, SHAPES["whole"], torch.bfloat16)
        for left_out in ("x", "weight", "bias", "x weight"):
            yield (
                f"{recipe.name} without {left_out}",
                _layer(recipe, SHAPES["whole"], torch.float32, left_out),
            )
        yield (
            f"{recipe.name} no advance",
            _layer(recipe, SHAPES["ragged"], torch.float32, advances=False),
        )
        if not recipe.has_state:
            yield f"{recipe.name} function", _function(recipe)


def _layer(
    recipe: Recipe,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    left_out: str = "",
    advances: bool = True,
) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        tokens, k, n = shape
        layer = ng.QLinear(k, n, recipe=recipe, dtype=dtype)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in left_out.split())
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2) if trained else None
        for step in range(STEPS):
            for micro in range(2):
                x = (
                    (torch.randn(tokens, k) * (1 + 10 * step))
                    .to(dtype)
                    .requires_grad_("x" not in left_out.split())
                )
                layer.observer = (
                    _observer(note, f"step {step} sees") if step == 1 and micro == 1 else None
                )
                y = layer(x[None] if micro else x)
                note(f"step {step}.{micro} y", y)
                if y.requires_grad:
                    y.float().square().sum().backward()
                note(f"step {step}.{micro} grad x", x.grad)
            for name, parameter in layer.named_parameters():
                note(f"step {step} grad {name}", parameter.grad)
            if optimizer is not None and advances:
                optimizer.step()
                ng.advance(layer)
            elif advances:
                ng.advance(layer)
            with torch.no_grad():
                for parameter in trained:
                    if not advances:
                        parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad = None
            for name, tensor in layer.state_dict().items():
                note(f"step {step} {name}", tensor)
        layer.observer = None
        x = torch.randn(tokens, k, dtype=dtype)
        layer.eval()
        note("eval", layer(x))
        with torch.no_grad():
            note("eval no_grad", layer(x))
        layer.train()
        with torch.no_grad():
            note("train no_grad", layer(x))
        with torch.inference_mode():
            note("inference", layer(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            note("autocast", layer(x.requires_grad_()))
        for name, tensor in layer.state_dict().items():
            note(f"end {name}", tensor)

    return run


def _observer(note: Note, name: str) -> Callable[..., None]:
    def see(gemm: str, role: str, original: Tensor, operand: Any) -> None:
        value = ng.dequantize(operand) if isinstance(operand, ng.QTensor) else operand
        note(f"{name} {gemm} {role} original", original)
        note(
            f"{name} {gemm} {role} operand", value.flatten().sort().values
        )  # in whichever orientation it was shown

    return see


def _function(recipe: Recipe) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        x = torch.randn(4, 8, 64, requires_grad=True)
        weight, bias = torch.randn(48, 64, requires_grad=True), torch.randn(48, requires_grad=True)
        y = ng.linear(x, weight, bias, recipe)
        y.backward(torch.randn(4, 8, 48))
        for name, tensor in (("y", y), ("x", x.grad), ("weight", weight.grad), ("bias", bias.grad)):
            note(name, tensor)

    return run


# --- a model ---------------------------------------------------------------------------------------------------------------------


def _models() -> Iterator[tuple[str, Callable[[Note], None]]]:
    for recipe in recipes.names():
        for fused in (False, True):
            yield f"{recipe}{' fused' if fused else ''}", _model(recipe, fused)
        for kind in ("bfloat16", "float16"):
            yield f"{recipe} autocast {kind}", _model(recipe, autocast=getattr(torch, kind))
        for reentrant in (False, True):
            yield (
                f"{recipe} checkpointing{' reentrant' if reentrant else ''}",
                _model(recipe, reentrant=reentrant),
            )
        yield f"{recipe} frozen", _model(recipe, frozen=True)
    for states in ("8bit", "fp32"):
        yield f"fp8-delayed AdamW {states}", _model("fp8-delayed", states=states)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=96,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _model(
    recipe: str,
    fused: bool = False,
    autocast: torch.dtype | None = None,
    reentrant: bool | None = None,
    frozen: bool = False,
    states: str = "",
) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        model: Any = ng.convert(_llama(), recipe, fuse=fused)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        if frozen:
            model.model.layers[0].requires_grad_(False)
            model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-3)
        if states:
            optimizer = ng.optim.AdamW(trained, lr=1e-3, states=states)
        model.train()
        for step in range(STEPS):
            for _ in range(2):
                ids = torch.randint(0, 96, (2, 9))
                with torch.autocast(
                    "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None
                ):
                    loss = model(input_ids=ids, labels=ids).loss
                note(f"step {step} loss", loss)
                loss.backward()
            for name, parameter in model.named_parameters():
                note(f"step {step} grad {name}", parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)
            with torch.no_grad():
                note(f"step {step} no_grad", model(input_ids=ids, labels=ids).loss)
                with ng.suspended(model):
                    note(f"step {step} suspended", model(input_ids=ids, labels=ids).loss)
            model.eval()
            note(f"step {step} eval", model(input_ids=ids, labels=ids).loss)
            model.train()
        for name, tensor in model.state_dict().items():
            note(f"end {name}", tensor)

    return run


# --- compiled --------------------------------------------------------------------------------------------------------------------


def _compiled() -> Iterator[tuple[str, Callable[[Note], None]]]:
    for recipe in recipes.names():
        yield f"{recipe} aot_eager", _compiled_layer(recipe, "aot_eager")
    for recipe in ("fp8-current", "fp8-delayed", "int4-hq-lss"):
        yield f"{recipe} inductor", _compiled_layer(recipe, "inductor")


def _compiled_layer(recipe: str, backend: str) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        model: Any = ng.convert(
            nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64)), recipe
        )
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(2):
            x = torch.randn(24, 64, requires_grad=True)
            loss = compiled(x).square().mean()
            note(f"step {step} loss", loss)
            loss.backward()
            note(f"step {step} grad x", x.grad)
            for name, parameter in model.named_parameters():
                note(f"step {step} grad {name}", parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)
            for name, tensor in model.state_dict().items():
                note(f"step {step} {name}", tensor)

    return run


# --- the command -----------------------------------------------------------------------------------------------------------------


def difference(base: dict[str, str], here: dict[str, str]) -> str:
    """The first number that differs, in words; '' if every bit is equal.

    Numbers of a recipe that BASE does not know are left out.
    """
    missing = [key for key in base if key not in here]
    if missing:
        return f"{len(base)} numbers at BASE, {len(here)} here; missing {missing[:1]}"
    differing = [key for key in base if base[key] != here[key]]
    return (
        f"{len(differing)} of {len(base)} numbers differ, first {differing[0]!r}"
        if differing
        else ""
    )


def _recorded_at(commit: str, only: str | None) -> dict[str, str]:
    from benchmarks.same_loss import RunFailed, checked_out

    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name:
        path = Path(name) / "base.json"
        with checked_out(commit, Path(name)) as tree:
            command = [sys.executable, str(Path(__file__).resolve()), "--record", str(path)]
            command += ["--only", only] if only else []
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, encoding="utf-8"
            )
            if done.returncode:
                raise RunFailed(
                    f"same-numbers: recording {commit} failed:\n{done.stdout}{done.stderr}"
                )
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--record", type=Path, help="write this tree's numbers into this file")
    parser.add_argument("--against", type=Path, help="a file that --record wrote")
    parser.add_argument("--only", choices=("layer", "model", "compiled"), help="one group of cases")
    options = parser.parse_args()
    if (options.base is None) + (options.record is None) + (options.against is None) != 2:
        parser.error("give one of --base, --record and --against")
    base = None
    if options.base is not None:
        from benchmarks.same_loss import RunFailed

        try:
            base = _recorded_at(options.base, options.only)
        except RunFailed as failed:
            print(failed, file=sys.stderr)
            return 2
    here = recorded(options.only)
    if options.record is not None:
        options.record.write_text(json.dumps(here), encoding="utf-8")
        print(f"same-numbers: {len(here)} numbers written to {options.record}.")
        return 0
    if base is None:
        base = json.loads(options.against.read_text(encoding="utf-8"))
        base = {
            key: value
            for key, value in base.items()
            if options.only is None or key.startswith(options.only)
        }
    differs = difference(base, here)
    print(
        f"same-numbers: {f'CHANGED: {differs}' if differs else f'{len(here)} numbers are equal to the last bit'}."
    )
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
