"""convert(embeddings="int4"): gives a model's embeddings codes with a learned step, in place (`nn.embedding`), and takes them again."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.embedding import FORMATS, Codes, QEmbedding


def quantized_embeddings(model: nn.Module) -> Iterator[tuple[str, QEmbedding]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QEmbedding))


def check_embeddings(model: nn.Module, codes: object) -> None:
    """Before anything is changed. ConfigError for other codes, and for a model none of whose embeddings can have them."""
    if codes not in FORMATS:
        raise ConfigError(
            f"convert: embeddings = {codes!r}; it is one of {', '.join(map(repr, FORMATS))}, or None.",
            code="convert.embeddings",
        )
    if words := problem(model):
        raise ConfigError(
            f"convert: embeddings = {codes!r}: {words} Or leave embeddings out.", code="convert.embedding-codes"
        )


def problem(model: nn.Module) -> str:
    """Why the embeddings of a model cannot have codes, a sentence and what can be done, or ''."""
    found = {name: refuse(each) for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    if not found:
        return f"{type(model).__name__} holds no nn.Embedding. Take a model that looks rows up."
    reasons = {name: reason for name, reason in found.items() if reason}
    for name, reason in reasons.items():
        return f"{len(reasons)} of {len(found)} embeddings cannot have codes: {name!r} {reason}. Change the layer."
    return ""


def quantize_embeddings(model: nn.Module, codes: Codes) -> None:
    """Those that have these codes already keep their step."""
    for module in list(model.modules()):
        if isinstance(module, QEmbedding) and module.format != FORMATS[codes]:
            module.restore()
        if type(module) is nn.Embedding:
            QEmbedding.adopt(module, codes)


def restore_embeddings(model: nn.Module) -> None:
    for _, module in list(quantized_embeddings(model)):
        module.restore()


def refuse(module: nn.Embedding) -> str:
    """Why an embedding cannot have codes; ''."""
    if type(module) not in (nn.Embedding, QEmbedding):
        return f"is a {type(module).__name__}, with a forward of its own"
    if module.max_norm is not None:
        return "has a max_norm, by which each look-up writes its rows"
    if module.sparse:
        return "has sparse gradients, and no optimizer here steps by them"
    if type(module.weight).__name__ == "DTensor":
        return "is spread over ranks, and its step is one number for the whole; data parallelism and fully_shard, after convert, keep it so"
    return ""
