"""A study of three recipes and five seeds on Multi30k, English to German, by `narrowgauge study`; killed on the way, and resumed.

    python -m benchmarks.study_translation --data MULTI30K_FOLDER --kills 3

A Marian model from scratch, small enough for fifteen runs on a CPU: width 64, one layer each side, a joint BPE of 1,000 pieces, the first
8,000 pairs. The study is started by its command line, killed with SIGKILL at random moments (the study's process, or one of its runs), and
started again with the same command until it ends. Then one killed run is trained anew without a kill, and every loss must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import translate
from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose.runs import read_metrics

RECIPES = ("bf16", "fp8-current", "int4-hq-bs")
SETTINGS = """task.name = "seq2seq"
model.name = "{folder}/model"
model.from_scratch = true
data.source = "{folder}/train.jsonl"
data.validation_data = "{folder}/val.jsonl"
data.columns.source = "en"
data.columns.target = "de"
data.max_length = 48
data.too_long = "truncate"
device = "cpu"
batch.size = 32
training.steps = {steps}
optimizer.warmup_steps = 25
optimizer.learning_rate = 3e-3
evaluation.every = {every}
evaluation.tokens = 20000
checkpoint.every = 50
log.tensor_every = 0
evaluation.sample_tokens = 0
task.best = "none"
"""


def main() -> None:
    options = _options()
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    prepare(options.data, folder, options.pairs)
    file = folder / "settings.toml"
    file.write_text(
        SETTINGS.format(folder=folder, steps=options.steps, every=options.steps // 5),
        encoding="utf-8",
    )
    study = folder / "study"
    asked = [
        str(file),
        f"--recipes={','.join(options.recipes)}",
        f"--seeds={options.seeds}",
        f"--output={study}",
    ]
    command = [sys.executable, "-m", "narrowgauge", "study", *asked]
    kill(command, study, options.kills, random.Random(0))
    subprocess.run(command, check=True)
    logs = sorted(study.glob("*-seed*/metrics.jsonl"))
    resumed = {path.parent.name: steps for path in logs if (steps := resumptions(path))}
    same = same_without_a_kill(study, folder, next(iter(resumed), ""))
    event = [event for event in read_metrics(study / "metrics.jsonl") if event["event"] == "study"][
        -1
    ]
    shown = {
        "steps": options.steps,
        "pairs": options.pairs,
        "study": ["narrowgauge", "study", *asked],
    }
    about = {"metric": event["metric"], "reference": event["reference"], "resumed": resumed}
    about |= {"same_losses_without_a_kill": same, "train_s": sum(map(trained_s, logs))}
    record(
        "study_translation",
        [row | about | {"settings": shown} for row in event["verdicts"]],
        options.results,
    )


def prepare(data: Path, folder: Path, pairs: int) -> None:
    """Model, tokenizer and tables, once."""
    from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

    if (folder / "model" / "config.json").exists():
        return
    lines = {
        name: (data / name).read_text(encoding="utf-8").splitlines()
        for name in ("train.en", "train.de", "val.en", "val.de")
    }
    for part in ("train", "val"):
        both = zip(lines[f"{part}.en"], lines[f"{part}.de"], strict=True)
        rows = [
            json.dumps({"en": english, "de": german}, ensure_ascii=False)
            for english, german in both
        ]
        (folder / f"{part}.jsonl").write_text(
            "".join(row + "\n" for row in rows[: pairs if part == "train" else None]),
            encoding="utf-8",
        )
    found = translate.bpe(lines["train.en"][:pairs] + lines["train.de"][:pairs], vocabulary=1000)
    found.no_truncation()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=found,
        pad_token=translate.PAD,
        eos_token=translate.END,
        unk_token=translate.UNKNOWN,
    )
    padding = tokenizer.pad_token_id
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tokenizer), d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=128, decoder_ffn_dim=128,
            encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, pad_token_id=padding, decoder_start_token_id=padding, eos_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None, scale_embedding=True, share_encoder_decoder_embeddings=True, init_std=64**-0.5,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def kill(command: list[str], study: Path, kills: int, rng: random.Random) -> None:
    """Starts the study so many times, and kills it, or one of its runs and then it, some seconds later; a finished one ends before."""
    for _ in range(kills):
        process = subprocess.Popen(command)
        until_s, of_run = time.monotonic() + rng.uniform(30.0, 60.0), rng.random() < 0.5
        while time.monotonic() < until_s and process.poll() is None:
            time.sleep(0.2)
        found = holders(study)
        if of_run and found and process.poll() is None:
            os.kill(rng.choice(found)[1], signal.SIGKILL)
            time.sleep(rng.uniform(5.0, 15.0))  # the study starts that run again
        process.kill()
        process.wait()


def resumptions(log: Path) -> list[int]:
    """The steps that a run went on from, by the lines of its log: a later resumption hides those before."""
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [event["step"] for event in lines if event["event"] == "resume"]


def trained_s(log: Path) -> float:
    """Seconds that a run spent in its steps."""
    return float(
        max(
            (event["elapsed_s"] for event in read_metrics(log) if event["event"] == "step"),
            default=0.0,
        )
    )


def holders(study: Path) -> list[tuple[str, int]]:
    """(name, process) of the runs that go on, by the locks that they hold."""
    found = []
    for path in sorted(study.glob("*-seed*/lock")):
        with open(path, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(
                    ValueError, KeyError
                ):  # held, and its name not written yet
                    found.append((path.parent.name, json.loads(lock.read())["pid"]))
    return found


def same_without_a_kill(study: Path, folder: Path, name: str) -> bool | None:
    """Whether a run that was killed has the losses of one that was not; None if none was killed."""
    if not name:
        return None
    again = folder / "again"
    shutil.rmtree(again, ignore_errors=True)
    text = (
        (study / name / "asked.toml")
        .read_text(encoding="utf-8")
        .replace(str(study / name), str(again))
    )
    (folder / "again.toml").write_text(text, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "narrowgauge", "train", str(folder / "again.toml")], check=True
    )
    left, right = (losses(study / name), losses(again))
    return left == right


def losses(run: Path) -> dict[tuple[str, int], float]:
    """Of its steps and evaluations."""
    events = read_metrics(run / "metrics.jsonl")
    return {
        (event["event"], event["step"]): event["loss"]
        for event in events
        if event["event"] in ("step", "eval")
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.study_translation", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with Multi30k's train and val, .en and .de"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--pairs", type=int, default=8000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/study_translation"))
    parser.add_argument("--results", type=Path, default=RESULTS / "study_translation.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
