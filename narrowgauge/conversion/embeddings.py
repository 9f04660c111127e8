"""convert(embeddings="int4"): quantize a model's embeddings in place, and undo it."""

from __future__ import annotations

from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.converted_model import quantized_embeddings
from narrowgauge.nn.embedding import FORMATS, Codes, QEmbedding


def check_embeddings(model: nn.Module, codes: object) -> None:
    """Raise ConfigError before anything changes.

    Reasons: unknown codes, or an embedding of the model that cannot be quantized.
    """
    if codes not in FORMATS:
        raise ConfigError(
            f"convert: embeddings = {codes!r}; it is one of {', '.join(map(repr, FORMATS))}, or None.",
            code="convert.embeddings",
        )
    if words := problem(model):
        raise ConfigError(
            f"convert: embeddings = {codes!r}: {words} Or leave embeddings out.",
            code="convert.embedding-codes",
        )


def problem(model: nn.Module) -> str:
    """Return why the model's embeddings cannot be quantized, with the next step, or ''."""
    found = {
        name: refuse(each) for name, each in model.named_modules() if isinstance(each, nn.Embedding)
    }
    if not found:
        return f"{type(model).__name__} holds no nn.Embedding. Take a model that looks rows up."
    reasons = {name: reason for name, reason in found.items() if reason}
    for name, reason in reasons.items():
        return f"{len(reasons)} of {len(found)} embeddings cannot have codes: {name!r} {reason}. Change the layer."
    return ""


def quantize_embeddings(model: nn.Module, codes: Codes) -> None:
    """Quantize all embeddings. Embeddings with these codes already keep their learned step."""
    for module in list(model.modules()):  # a list: `adopt` adds a child module during the loop
        if isinstance(module, QEmbedding) and module.format != FORMATS[codes]:
            module.restore()
        if type(module) is nn.Embedding:
            QEmbedding.adopt(module, codes)


def restore_embeddings(model: nn.Module) -> None:
    for _, module in list(quantized_embeddings(model)):
        module.restore()


def refuse(module: nn.Embedding) -> str:
    """Return the reason why an embedding cannot be quantized, or ''."""
    if type(module) not in (nn.Embedding, QEmbedding):
        return f"is a {type(module).__name__}, with a forward of its own"
    if module.max_norm is not None:
        return "has a max_norm, by which each look-up writes its rows"
    if module.sparse:
        return "has sparse gradients, and no optimizer here steps by them"
    if type(module.weight).__name__ == "DTensor":
        return "is spread over ranks, and its step is one number for the whole; data parallelism and fully_shard, after convert, keep it so"
    return ""
