"""A guarded run in a process that is killed at one of its places."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from narrowgauge.lab import probe, run_guard, training
from narrowgauge.nn.linear import QLinear
from narrowgauge.train import assembly
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.parallel import checkpoints
from narrowgauge.train.trainer import Trainer

# A run that is much worse than BF16: the second check finds it.
SICK: dict[str, Any] = {
    "recipe": "fp8-current",
    "steps": 20,
    "guard": "every=4,steps=2,margin=0.02%,then=stay",
}


def hurt(model: Any) -> None:
    """The gradients of what layers compute on narrow numbers point the other way, and are large."""

    def reversed_gradient(layer: Any, given: Any, output: Any) -> Any:
        return output if _is_wide(layer) else 21 * output.detach() - 20 * output

    for layer in model.modules():
        if isinstance(layer, QLinear):
            layer.register_forward_hook(reversed_gradient)


def _is_wide(layer: Any) -> bool:
    return layer.is_suspended or layer.recipe is None or layer.recipe.name in ("bf16", "fp8-row")


def run(config: TrainConfig, at: int) -> int:
    """In a process that is forked with its imports made; its exit code. at: the place of the kill, 0: nowhere, but places are counted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["narrowgauge.train.loop", "transformers.models.llama.modeling_llama", __name__]
    )
    process = context.Process(target=main, args=(config, at))
    process.start()
    process.join(300)
    code = process.exitcode
    process.kill()
    assert code is not None, "it hangs"
    return code


def places(config: TrainConfig) -> int:
    """How many there were in the run."""
    return int(Path(config.output + ".places").read_text())


def main(config: TrainConfig, at: int) -> None:
    torch.set_num_threads(1)
    count = 0

    def around(owner: Any, name: str) -> None:
        """Places: just before and just after what the owner calls by that name."""
        real: Callable[..., Any] = getattr(owner, name)

        def called(*given: Any, **named: Any) -> Any:
            place()
            result = real(*given, **named)
            place()
            return result

        setattr(owner, name, called)

    def place() -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    build = assembly.build

    def sick(*given: Any) -> Any:
        model = build(*given)
        hurt(model)
        return model

    setattr(assembly, "build", sick)  # noqa: B010
    around(probe, "_step")
    around(checkpoints, "save")
    around(run_guard.RunSteps, "adopt")
    around(Trainer, "exchange")
    around(Trainer, "restore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        code = training.run(config)
    if not at:
        Path(config.output + ".places").write_text(str(count))
    sys.exit(code)
