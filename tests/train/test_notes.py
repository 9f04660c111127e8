"""Notes on settings (exact): said where they surprise, and nowhere else."""

import pytest

from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.preparation import notes

FINE = {"model": "my-encoder", "learning_rate": 5e-5, "warmup_steps": 20, "steps": 100}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"learning_rate": 1e-3}, ["optimizer.learning_rate = 0.001 "]),
        ({"learning_rate": 1e-3, "model": ""}, []),
        ({"learning_rate": 1e-3, "from_scratch": True}, []),
        ({"learning_rate": 1e-3, "optimizer": "sgd"}, []),
        ({"steps": 20}, ["optimizer.warmup_steps = 20 does not end within the 20 steps"]),
        ({"steps": 21}, []),
        ({"steps": 2, "warmup_steps": 0}, []),
        ({"recipe": "int4-hq-lss"}, []),
        (
            {"recipe": "int4-hq-lss", "compile": True},
            ["device.compile = true with int4-hq-lss: code is made anew"],
        ),
        (
            {"layers_recipe": {"up_proj": "int4-hq-lss"}, "compile": True},
            ["device.compile = true with int4-hq-lss: "],
        ),
        ({"recipe": "int4-hq-bs", "compile": True}, []),
        ({"recipe": "none", "compile": True}, []),
        (
            {"recipe": "fp8-current", "compare": "fp8"},
            [
                "recipe 'fp8' stands for 'fp8-current'",
                "compare = 'fp8' is the recipe of the run itself",
            ],
        ),
        (
            {"recipe": "none", "compare": "none"},
            ["compare = 'none' is the recipe of the run itself"],
        ),
        (
            {"recipe": "fp8", "compare": "fp8-current", "layers_recipe": {"up_proj": "bf16"}},
            ["recipe 'fp8' stands for 'fp8-current'"],
        ),
        (
            {"recipe": "fp8", "compare": "fp8-current", "switch": "bf16@80%"},
            ["recipe 'fp8' stands for 'fp8-current'"],
        ),
        ({"recipe": "fp8", "compare": "fp8-row"}, ["recipe 'fp8' stands for 'fp8-current'"]),
        ({"recipe": "4bit"}, ["recipe '4bit' stands for 'int4-hq-bs'"]),
        ({"recipe": "int4", "compare": "int4-row-sr"}, ["recipe 'int4' stands for 'int4-hq-bs'"]),
        (
            {"steps": 9, "learning_rate": 2e-3},
            ["optimizer.learning_rate = 0.002 ", "optimizer.warmup_steps = 20 "],
        ),
    ],
    ids=str,
)
def test_notes(changes, said):
    found = list(notes(TrainConfig(**(FINE | changes))))
    assert len(found) == len(said) and all(
        note.startswith(start) for note, start in zip(found, said, strict=True)
    )
