"""A guarded run in a process that is killed at one of its places: python killed_guard.py CONFIG AT; AT = 0: nowhere, but counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowgauge.nn.linear import QLinear
from narrowgauge.train import guarded, loop, stretch
from narrowgauge.train import trainer as trainer_module
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.parallel import checkpoints
from narrowgauge.train.trainer import Trainer
from tests.processes import PYTHON, ROOT

# A run that is much worse than BF16: the second check finds it.
SICK: dict[str, Any] = {"recipe": "fp8-current", "steps": 20, "guard": "every=4,steps=2,margin=0.02%,then=stay"}


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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, __file__, json.dumps(asdict(config)), str(at)]
    return subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode


def places(config: TrainConfig) -> int:
    """How many there were in the run."""
    return int(Path(config.output + ".places").read_text())


def main(config: TrainConfig, at: int) -> int:
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

    build = trainer_module.build

    def sick(*given: Any) -> Any:
        model = build(*given)
        hurt(model)
        return model

    setattr(trainer_module, "build", sick)  # noqa: B010
    around(stretch, "_step")
    around(checkpoints, "save")
    around(guarded.Guard, "_become")
    around(guarded.Guard, "saved")
    around(Trainer, "take_up")
    code = loop.run(config)
    if not at:
        Path(config.output + ".places").write_text(str(count))
    return code


if __name__ == "__main__":
    sys.exit(main(TrainConfig(**json.loads(sys.argv[1])), int(sys.argv[2])))
