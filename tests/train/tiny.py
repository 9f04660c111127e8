"""A run of a second or two: pseudo-English, a Llama of 37,000 parameters, six steps, and what its folder says afterwards."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import TrainConfig, key_of
from tests.compare import bits

WORDS = [
    "scale",
    "tile",
    "amax",
    "codes",
    "the",
    "of",
    "and",
    "a",
    "rounds",
    "stores",
    "narrow",
    "wide",
    "exact",
]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 48, "sequence_length": 16, "vocab_size": 300,
    "batch_size": 4, "steps": 6, "warmup_steps": 2, "eval_every": 0, "eval_tokens": 128, "eval_wide": False, "checkpoint_every": 0,
    "tensor_every": 0, "sample_tokens": 0, "log_every": 10, "threads": 1, "device": "cpu",
}  # fmt: skip


def write_text(folder: Path, documents: int = 40) -> Path:
    """Enough documents to split by; the same for the same number."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(documents):
        draw = random.Random(seed)
        lines = [" ".join(draw.choices(WORDS, k=8)).capitalize() + ".\n" for _ in range(20 + seed)]
        (folder / f"{seed:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def settings(text: Path, output: Path, **changes: Any) -> TrainConfig:
    values = {
        **SIZES,
        "data": str(text),
        "cache": str(text.parent / "cache"),
        "output": str(output),
        **changes,
    }
    if "model" in changes:
        values = {
            key: value
            for key, value in values.items()
            if key not in ("hidden_size", "layers", "heads")
        }
        values.pop("intermediate_size")
    return TrainConfig(**values)


def flags(config: TrainConfig, text: Path) -> list[str]:
    """The command line of `settings`."""
    values = {key: getattr(config, key) for key in SIZES} | {
        "recipe": config.recipe,
        "precision": config.precision,
    }
    values |= {"data": text, "cache": text.parent / "cache", "output": config.output}
    keys = {name: key_of(each) for name, each in TrainConfig.__dataclass_fields__.items()}
    return [f"--{keys[name].replace('_', '-')}={value}" for name, value in values.items()]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(folder / "metrics.jsonl") if event["event"] == kind]


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder, "step")}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor of the newest checkpoint, with its dtype and shape."""
    found, skipped = store.newest_valid(folder / "checkpoints")
    assert found is not None and not skipped
    result = {
        "step": str(found.step),
        "scaler": str(found.facts["state"]["scaler"]),
        "rng": str(found.facts["state"]["rng"]),
    }
    for group, members in found.tensors.items():
        for name, tensor in members.items():
            data = bits(tensor).numpy().tobytes()
            head = f"{tensor.dtype} {list(tensor.shape)}".encode()
            result[f"{group}: {name}"] = hashlib.sha256(head + data).hexdigest()
    return result
