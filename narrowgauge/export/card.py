"""The README.md of an export, a model card: what the numbers are, where they come from, how to load them.

Only what is known is said. Facts of a training run come from its folder
(`narrowgauge.train.exporting`), the rest from the export itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.export.file_formats import ExportFormat

LISTED = 12  # reasons in the card; export.json has every layer

LOADING = {
    "compressed-tensors": """\
```python
# transformers, computing in bfloat16 (pip install compressed-tensors)
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True))
```
""",
    "fp8": """\
```python
# transformers (pip install accelerate); without a GPU it decodes the weights to bfloat16
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
```
""",
    "": """\
```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
```
""",
}
SERVING = """\
```sh
vllm serve {folder}
python -m sglang.launch_server --model-path {folder}
```
"""
GGUF = """\
```sh
llama-server -m {folder}/model.gguf
llama-cli -m {folder}/model.gguf -p "Once upon a time"
```
"""
LLAMA = """\
llama.cpp reads GGUF: `python convert_hf_to_gguf.py {folder} --outtype {kind}` of its sources {words}.
"""


def text(form: ExportFormat, report: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The card. report: as in export.json. facts: of the training run, '' or absent if unknown."""
    parts = [
        f"# {report['model']} in {form.name}",
        f"{form.summary[0].upper()}{form.summary[1:]}. Written by narrowgauge {report['narrowgauge']}.",
        _numbers(form, report),
        *_training(facts),
        "## Loading",
        _loading(form, report),
        *_wide(report),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _numbers(form: ExportFormat, report: Mapping[str, Any]) -> str:
    bits, loaded = report["bits"], report["loading"]
    if form.cast is None:
        said = [
            "The weights are the master weights, rounded to 16 bits: no cast of a recipe is in them."
        ]
    else:
        equal = bits["equal"]
        said = [
            f"{len(report['narrow'])} Linears hold codes, {len(report['wide'])} weights stay in {report['dtype']}. "
            f"{equal} of {bits['layers'] - len(bits['requantized'])} weights decode to the numbers by which the training forward "
            "multiplies, bit for bit."
        ]
        if bits["largest_difference"]:
            said.append(
                f"The others differ by at most {bits['largest_difference']:.2g} of their norm, the rounding of NVFP4's two scales."
            )
    if bits["requantized"]:
        largest = max(bits["requantized"].values())
        said.append(
            f"{len(bits['requantized'])} weights were cast anew for this format, by up to {largest:.2g} of their norm from the forward's."
        )
    if report["calibration"]:
        said.append(f"The static scales of x are of {calibrated_by(report['calibration'])}.")
    if not loaded["checked"]:
        said.append(loaded["why"])
    elif loaded["weights"]:
        share = f"{loaded['equal_elements']:.2%} of the elements"
        said.append(f"transformers read {loaded['weights']} of these weights, {share} to the bit.")
    if logits := loaded.get("logits"):
        said.append(
            f"Outputs of the loaded model are {logits['loaded']:.2g} from the training forward's (relative), those of the same "
            f"weights without the recipe {logits['wide']:.2g}: a reader that decodes weights leaves activations in 16 bits."
        )
    return " ".join(said)


def calibrated_by(seen: Mapping[str, Any]) -> str:
    """Words for the rows that a calibration has read."""
    source = f" of {seen['source']}" if seen["source"] else ""
    rows = f"{seen['rows']} row{'s' if seen['rows'] > 1 else ''}"
    return f"{seen['tokens']:,} tokens{source}, in {rows} of {seen['positions']}"


def _training(facts: Mapping[str, Any]) -> list[str]:
    rows = [(title, str(facts[key])) for key, title in _FACTS.items() if facts.get(key)]
    if not rows:
        return []
    return ["## Training", "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])]


_FACTS = {
    "recipe": "recipe",
    "precision": "precision",
    "task": "task",
    "data": "data",
    "source": "weights of",
    "steps": "steps",
    "loss": "loss",
    "verdict": "verdict on the recipe",
}


def _loading(form: ExportFormat, report: Mapping[str, Any]) -> str:
    method, folder = form.config([]).get("quant_method", ""), "THIS_FOLDER"
    if form.is_gguf:
        return "\n\n".join((GGUF.format(folder=folder), f"Readers: {form.readers}."))
    code = (
        LOADING.get(method, "")  # no transformers for modelopt
        .replace("FOLDER", f'"{folder}"')
        .replace("AutoModelForCausalLM", report["model"])
    )
    words = f"Readers: {form.readers}."
    if not method:
        words += "\n\n" + LLAMA.format(folder=folder, kind="bf16", words="converts this folder")
    return "\n\n".join((code, SERVING.format(folder=folder), words))


def _wide(report: Mapping[str, Any]) -> list[str]:
    """A table of the reasons for which weights stay wide, the most frequent first."""
    # A model has hundreds of layers and a handful of reasons.
    reasons = Counter(report["wide"].values())
    if not reasons or not report["narrow"]:
        return []
    first: dict[str, str] = {}
    for name, why in report["wide"].items():
        first.setdefault(why, name)
    rows = [
        f"| {count} | `{first[why]}` | {why} |".replace("\n", " ")
        for why, count in reasons.most_common(LISTED)
    ]
    return [
        f"## Weights in {report['dtype']}",
        "\n".join(["| weights | as | why |", "|---|---|---|", *rows]),
    ]
