"""Write the files of one tree that later trees must go on reading.

    PYTHONPATH=OLD_TREE python tests/compatibility/write.py tests/compatibility/tree_YYYY_MM_DD

Writes two run folders with one checkpoint each, and `states.pt`: state dicts of a model in every
recipe, and of every optimizer rule with every state format.
Run it with a released tree alone; the folder that it wrote never changes afterwards.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import narrowgauge as ng

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "was")
SETTINGS = (
    "--data text.txt --vocab-size 257 --hidden-size 16 --layers 1 --heads 2 --intermediate-size 32 "
    "--sequence-length 16 --batch-size 4 --warmup-steps 1 --eval-every 3 --checkpoint-every 3 "
    "--eval-tokens 64 --sample-tokens 4 --tensor-every 3 --device cpu --threads 1 --keep 1"
)
RUNS = {
    "int4": "--steps 6 --recipe int4-hq-lss --states 8bit",
    "delayed": "--steps 12 --recipe fp8-delayed --states fp8-lm --guard every=5,steps=2 "
    "--recipes lm_head=bf16 --precision bf16-o2",
}
PAIRS = ("e4m3/8bit", "fp16/8bit")  # of two moments: AdamW alone
STATES = ("fp32", "8bit", "fp8", "fp8-lm", "4bit")
RATE = 0.01


def model_of(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 16))
    return ng.convert(model, recipe)


def optimizer_of(rule: str, states: str) -> Any:
    """An optimizer of one parameter, [64, 64]: smaller ones have float32 moments in any format."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"momentum": 0.9} if rule == "SGD" else {}
    weight = nn.Parameter(torch.randn(64, 64))
    return getattr(ng.optim, rule)([weight], lr=RATE, states=states, **options)


def weight_of(optimizer: Any) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0]


def step(optimizer: Any, number: int) -> None:
    """A step by a gradient that its number decides; some rows are a thousand times smaller."""
    weight = weight_of(optimizer)
    random_numbers = torch.Generator().manual_seed(number % 2)
    weight.grad = torch.randn(weight.shape, generator=random_numbers)
    weight.grad[::4] *= 1e-3
    optimizer.step()


def rules() -> list[tuple[str, str]]:
    every = [(rule, states) for rule in ("AdamW", "Lion", "SGD") for states in STATES]
    return every + [("AdamW", states) for states in PAIRS]


def states() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for recipe in ng.recipes.names():
        model = model_of(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(3):
            model(torch.randn(40, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)
        found[f"model/{recipe}"] = model.state_dict()
    for rule, formats in rules():
        optimizer = optimizer_of(rule, formats)
        for number in range(5):
            step(optimizer, number)
        found[f"optimizer/{rule}/{formats}"] = optimizer.state_dict()
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    random.seed(0)
    text = "\n\n".join(" ".join(random.choice(WORDS) for _ in range(30)) for _ in range(60))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    for name, settings in RUNS.items():
        command = f"-m narrowgauge train {SETTINGS} {settings} --output {name}"
        subprocess.run([sys.executable, *command.split()], cwd=folder, check=True)
        # Resume, evaluate and compare read neither.
        (folder / name / "report.html").unlink()
        (folder / name / "lock").unlink()
        shutil.rmtree(folder / name / "final")
    shutil.rmtree(folder / "cache")
    torch.save(states(), folder / "states.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
