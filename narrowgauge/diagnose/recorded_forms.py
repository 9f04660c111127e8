"""The valid values of metrics.jsonl, by event, and of run.json. docs/architecture.md says what the keys mean.

Other keys may hold anything: a newer narrowgauge may write more.
"""

from __future__ import annotations

from narrowgauge.diagnose.forms import Form, anything, either, listed, number, one_of, record, table, text

COUNT = number(0, whole=True)
SIZE = number(0, finite=False)
SECONDS = number(0)
SHARE = number(0, 1, finite=False)
LOSS = number(-0.01, finite=False)  # a mean of -log p: below zero by rounding alone
NOTHING = one_of(None)
SIZES = either(COUNT, NOTHING, listed(anything))  # of models: unknown in some, one for each layer in others
HISTOGRAM = record({"lowest_exponent": number(-2000, 2000, whole=True), "counts": listed(COUNT)})

STEP = {
    "grad_norm": SIZE, "lr": SECONDS, "tokens": COUNT, "tokens_per_s": SIZE, "elapsed_s": SECONDS, "peak_bytes": COUNT,
    "compiled_graphs": COUNT, "epoch": SECONDS, "examples": COUNT, "inputs": COUNT, "positions": COUNT,
}  # fmt: skip
EVAL = {
    "tokens": COUNT, "elapsed_s": SECONDS, "perplexity": SIZE, "accuracy": SHARE, "mcc": number(-1.000001, 1.000001, finite=False),
    "f1": SHARE, "f1_binary": SHARE,
}  # fmt: skip
TENSOR = {
    "format": text, "amax": SIZE, "scale": SIZE, "underflow": either(SHARE, NOTHING), "saturated": either(SHARE, NOTHING),
    "nan": COUNT, "inf": COUNT, "zeros": COUNT, "histogram": either(HISTOGRAM, NOTHING),
}  # fmt: skip
LAUNCHES = {
    "words": text, "advice": listed(text), "idle": number(), "kernels": COUNT,
    **dict.fromkeys(("span_s", "launching_s", "waiting_s", "median_kernel_s"), number()),
}  # fmt: skip


def _event(required: dict[str, Form] | None = None, optional: dict[str, Form] | None = None) -> Form:
    return record({"event": text, "step": COUNT, **(required or {})}, optional)


EVENTS: dict[str, Form] = {
    "step": _event({"loss": LOSS}, STEP),
    "eval": _event({"loss": LOSS}, EVAL),
    "tensor": _event({"module": text, "role": text}, TENSOR),
    "launches": _event(None, LAUNCHES),
    "nonfinite_amax": _event({"module": text, "role": text}, {"count": COUNT}),
    "nonfinite": _event({"where": text}),
    "sample": _event(None, {"prompt": text, "text": text}),
    "checkpoint": _event({"path": text}, {"save_s": SECONDS}),
    "switch": _event({"switch": text}, {"layers": COUNT, "before": listed(text), "after": listed(text)}),
    "resume": _event(None, {"path": text, "skipped": listed(text)}),
    "done": _event({"reason": text}, {"exit_code": number(0, 255, whole=True)}),
}  # fmt: skip

MODEL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size", "max_length"), SIZES),
    "name": text, "sequence_length": COUNT,
}  # fmt: skip
DATA = {
    **dict.fromkeys(("documents", "train_tokens", "validation_tokens", "rows", "train_examples", "validation_examples"), SIZES),
    "source": text, "unigram_entropy": either(SIZE, NOTHING),
}  # fmt: skip
RUN = record(
    {},
    {
        **dict.fromkeys(("narrowgauge", "torch", "python", "device", "started_at", "recipe", "precision", "task", "best", "loss"), text),
        **dict.fromkeys(("command", "memory", "fused", "weight_casts"), listed(text)),
        "resumed": listed(listed(text)), "recipes": table(text), "auto": table(text),
        **dict.fromkeys(("threads", "seed", "parameters", "tokens_per_step", "steps"), COUNT),
        "switches": listed(record({"step": COUNT, "switch": text})),
        "model": record({}, MODEL), "data": record({}, DATA), "describe": listed(table(either(text, NOTHING))),
    },
)  # fmt: skip
