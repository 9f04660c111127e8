"""Memory of exports and of a base read as codes, at the shape of 1.1 B parameters; and kill -9 while they run.

    python -m benchmarks.export_limits --only memory    about 5 minutes on an idle core, 2.2 GB of disk
    python -m benchmarks.export_limits --only kills     about 3 minutes

memory  The peak of this process above the model's own memory, for exports; above the codes and the
        other tensors, for a base. The reach is the largest shard and 1 GiB. The model has TinyLlama's
        shape, random weights and bfloat16; each case is a process of its own.
kills   An export with `overwrite` of a model of 15 M parameters, and the start of `narrowgauge train
        --lora --base fp8-block`, each killed at points spread over their time. After each kill the
        output must be the older export or the newer one, whole by its hashes (or, between two renames,
        absent with the older one beside it, which the next export puts back), and the base's files
        unchanged. At the end both run without a kill, and the adapter must be that of an undisturbed
        run to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge import cli
from narrowgauge.errors import CheckpointError
from narrowgauge.optim import precision
from narrowgauge.recipes import get
from narrowgauge.train import coded_base

LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = LARGE | {
    "vocab_size": 2048, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 2,
}  # fmt: skip
TINY = LARGE | {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHARD = 2**29
REACH = 2**30  # bytes above the largest shard
LOADED = (
    "narrowgauge.lab.training",
    "narrowgauge.train.loop",
    "transformers.models.llama.modeling_llama",
    "peft",
)
CASES = ("fp8-channel", "gguf", "base")
RECIPES = {"fp8-channel": "fp8-row", "gguf": "int8"}


def built(sizes: dict[str, int]) -> Any:
    """A random Llama in bfloat16, whose weights are drawn in that dtype."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.ones_(each) if each.ndim == 1 else torch.nn.init.normal_(each, 0, 0.02)
    return model.eval()


# --- memory --------------------------------------------------------------------------------------


def status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key)) * 1024


@contextlib.contextmanager
def peak(found: dict[str, Any]) -> Iterator[None]:
    """Put the peak of resident memory above its size at the beginning into found["above"]."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the older peak
    before, started = status("VmRSS"), time.monotonic()
    yield
    found |= {"above": status("VmHWM") - before, "time_s": round(time.monotonic() - started, 1)}


def memory_case(case: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"case": case}
    if case == "base":
        sizes = transformers.AutoConfig.from_pretrained(folder)
        files = coded_base.files_of(str(folder))
        found["largest_shard"] = max(each.stat().st_size for each in files)
        with peak(found):
            model = coded_base.empty(transformers.AutoModelForCausalLM, sizes)
            precision.get("bf16-o3").prepare(model)
            ng.convert(model, get("fp8-block"))
            report = coded_base.fill(model, str(folder), torch.device("cpu"))
        found["held"] = report.code_bytes + report.wide_bytes
        found["above"] -= found["held"]
        return found | {
            "coded": report.coded,
            "bytes_per_weight": report.code_bytes / report.elements,
        }
    model = ng.convert(built(LARGE), RECIPES[case], share_scales=case == "gguf")
    found["held"] = sum(each.nbytes for each in model.parameters())
    out = folder.with_name("exported")
    with peak(found):
        written = ng.export.save(model, out, format=case, load=False, shard_bytes=SHARD)
    # GGUF is one file, written tensor by tensor: its shard is one tensor.
    sizes = {name: each["bytes"] for name, each in written.facts["files"].items()}
    tensor = max(each.nbytes for each in model.parameters())
    shard = (
        max(size for name, size in sizes.items() if name.endswith(".safetensors"))
        if case != "gguf"
        else tensor
    )
    shutil.rmtree(out)
    return found | {"largest_shard": shard, "coded": len(written.narrow)}


def memory(cases: list[str], place: Path) -> Iterator[dict[str, Any]]:
    folder = place / "large"
    if "base" in cases:
        built(LARGE).save_pretrained(folder, max_shard_size=SHARD)
    for case in cases:
        if case == "gguf" and importlib.util.find_spec("gguf") is None:
            print(
                "gguf: the package gguf is not installed, so this case is left out", file=sys.stderr
            )
            continue
        command = [sys.executable, "-m", "benchmarks.export_limits", "--child", case, str(folder)]
        said = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
        row = json.loads(said.splitlines()[-1])
        yield row | {"within": row["above"] <= row["largest_shard"] + REACH}


# --- kills ---------------------------------------------------------------------------------------


def child(work: Callable[[], int], said: Path) -> int:
    """Fork a process that works. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    with said.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = 99
        with contextlib.suppress(BaseException):
            code = work()
    os._exit(code)


def ended(pid: int) -> int | None:
    """Exit code; None after a kill."""
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def killed(work: Callable[[], int], after_s: float, said: Path) -> bool:
    """True if the kill came before the end."""
    pid = child(work, said)
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return ended(pid) is None


def exports(place: Path, kills: int) -> dict[str, Any]:
    model = ng.convert(built(SMALL), "fp8-row")
    out, said = place / "out", place / "said.txt"

    def save(form: str) -> int:
        ng.export.save(model, out, format=form, load=False, overwrite=True)
        return 0

    save("bf16")
    started = time.monotonic()
    assert ended(child(lambda: save("fp8-channel"), said)) == 0
    whole_s = time.monotonic() - started
    states: dict[str, int] = {}
    in_time = 0
    for number in range(kills):
        save("bf16")  # also puts back what a kill has left between two renames
        in_time += killed(lambda: save("fp8-channel"), 1.1 * whole_s * (number + 0.5) / kills, said)
        try:
            state = ng.export.verify(out)["format"]
        except CheckpointError:
            # The older one waits beside its name, and the next export puts it back.
            state = "between renames" if not out.exists() else "damaged"
            if state != "damaged":
                ng.export.verify(place / ".old-out")
        states[state] = states.get(state, 0) + 1
    save("fp8-channel")
    ng.export.verify(out)
    left = sorted(each.name for each in place.iterdir())
    return {
        "case": "export", "kills": kills, "before_the_end": in_time, "states": states, "whole_s": round(whole_s, 2), "left": left,
        "wrong": states.get("damaged", 0) + (left != ["out", "said.txt"]),
    }  # fmt: skip


def starts(place: Path, kills: int) -> dict[str, Any]:
    """Starts of a run over a base of codes, each killed, and one that goes to the end."""
    for name in LOADED:  # before the forks, so that kills meet the start and not its imports
        importlib.import_module(name)
    text, base, said = place / "text", place / "base", place / "said.txt"
    text.mkdir()
    words = "the narrow gauge of the mountain line takes the bends that broad tracks cannot "
    for split in ("train", "validation"):
        (text / f"{split}.txt").write_text(words * 400, encoding="utf-8")
    _with_tokenizer(base, words)
    digest = coded_base.digest(str(base))

    def train(output: str) -> int:
        return cli.main([
            "train", "--model", str(base), "--data", str(text), "--data.cache", str(place / "cache"), "--task", "text",
            "--lora", "r=4,alpha=8,targets=all-linear", "--base", "fp8-block", "--output", str(place / output),
            "--model.sequence-length", "32", "--batch.size", "2", "--training.steps", "3", "--evaluation.every", "0",
            "--evaluation.tokens", "256", "--evaluation.sample-tokens", "0", "--device", "cpu", "--device.threads", "1",
            "--optimizer.warmup-steps", "1", "--checkpoint.every", "1", "--resume",
        ])  # fmt: skip

    started = time.monotonic()
    assert ended(child(lambda: train("undisturbed"), said)) == 0, said.read_text(encoding="utf-8")
    whole_s = time.monotonic() - started
    in_time, wrong, finals = 0, 0, 0
    for number in range(kills):
        # A run that came to its end has nothing left to be killed in.
        if (place / "run/final").exists():
            shutil.rmtree(place / "run")
        in_time += killed(lambda: train("run"), 1.1 * whole_s * (number + 0.5) / kills, said)
        final = place / "run/final"
        if final.exists():
            finals += 1
            load_file(final / "adapter_model.safetensors")
        wrong += coded_base.digest(str(base)) != digest
    if not (place / "run/final").exists():
        wrong += ended(child(lambda: train("run"), said)) != 0
    here, there = (
        load_file(place / run / "final/adapter_model.safetensors") for run in ("run", "undisturbed")
    )
    wrong += here.keys() != there.keys() or any(
        not torch.equal(here[key], there[key]) for key in here
    )
    return {
        "case": "start of --base", "kills": kills, "before_the_end": in_time, "finals": finals, "whole_s": round(whole_s, 2),
        "wrong": int(wrong),
    }  # fmt: skip


def _with_tokenizer(folder: Path, words: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built(TINY).save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # fmt: skip
    backend.train_from_iterator([words], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.export_limits", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--only", choices=["memory", "kills"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS / "export_limits.jsonl")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(memory_case(options.child[0], Path(options.child[1]))))
        return
    for kind in ("memory", "kills"):
        if options.only not in (None, kind):
            continue
        with tempfile.TemporaryDirectory() as name:
            if kind == "memory":
                found: Any = memory(options.cases, Path(name))
            else:
                folders = [Path(name) / each for each in ("exports", "starts")]
                for folder in folders:
                    folder.mkdir()
                found = (
                    run(folder, options.kills)
                    for run, folder in zip((exports, starts), folders, strict=True)
                )
            for row in found:
                print(json.dumps(row), flush=True)
                record(f"export-limits-{kind}", [row], options.results)


if __name__ == "__main__":
    main()
