"""Log-probabilities of exported GGUF files by llama.cpp on a CPU, for `read_exports`.

    python llamacpp_reader.py FOLDER...    in an environment with xllamacpp and torch; one line of JSON for each folder

FOLDER holds model.gguf; FOLDER.reference.pt beside it the ids. llama.cpp is asked for the token after
a few prefixes of each row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import xllamacpp

PREFIXES = (5, 12, 20, 31)  # last position of each


def read(folder: Path) -> dict[str, Any]:
    held = torch.load(folder.with_suffix(".reference.pt"))
    ids, vocabulary = held["ids"], held["decoded"].shape[-1]
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 128, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = params.endpoint_metrics = False
    server = xllamacpp.Server(params)
    found = torch.full((*ids.shape, vocabulary), float("nan"))
    for row in range(len(ids)):
        for last in PREFIXES:
            found[row, last] = after(server, ids[row, : last + 1].tolist(), vocabulary)
    # Split and merged by llama.cpp, from the file: the same ids give the same numbers.
    pair = [after(server, each, vocabulary) for each in (held["text"], held["text_ids"])]
    return {
        "logprobs": found.tolist(),
        "text": torch.equal(*pair),
        "llama.cpp": xllamacpp.__version__,
    }


def after(server: Any, prompt: str | list[int], vocabulary: int) -> torch.Tensor:
    """[vocabulary] log-probabilities of the next token; NaN where llama.cpp gives none."""
    asked = {
        "prompt": prompt, "n_predict": 1, "n_probs": vocabulary, "temperature": 1.0, "post_sampling_probs": False,
        "cache_prompt": False, "samplers": [], "seed": 1,
    }  # fmt: skip
    answer: Any = server.handle_completions(asked)
    if isinstance(answer, str | bytes):
        answer = json.loads(answer)
    content = answer["choices"][0]["logprobs"]["content"][0]
    found = torch.full((vocabulary,), float("nan"))
    for each in content.get("top_logprobs") or content.get("top_probs"):
        found[each["id"]] = each["logprob"]
    return found


def main() -> None:
    for name in sys.argv[1:]:
        try:
            said = read(Path(name))
        except Exception as error:  # one row says it, and the others go on
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"folder": name, **said}), flush=True)


if __name__ == "__main__":
    main()
