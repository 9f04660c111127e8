"""Parameter groups of a model: embeddings apart, and vectors if matrices alone are decayed."""

from __future__ import annotations

from typing import Any

from torch import nn


def groups(model: nn.Module, *, weight_decay: float | None = None, embeddings: str = "fp32") -> list[dict[str, Any]]:
    """Trainable parameters as groups for an optimizer, named, each once (tied weights too).

    weight_decay  if given: that of matrices; tensors of one axis (norms, biases) get 0 and a group of their own
    embeddings    "fp32": weights of an nn.Embedding, also where a head is tied to one, go into groups with states="fp32";
                  "same": they stay with the others
    """
    found = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    sorted_out: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = embeddings == "fp32" and id(parameter) in found
            is_vector = weight_decay is not None and parameter.ndim < 2
            sorted_out.setdefault((is_embedding, is_vector), []).append((name, parameter))
    result = []
    for (is_embedding, is_vector), named in sorted(sorted_out.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {"params": named}
        if is_embedding:
            group |= {"states": "fp32", "why": "embedding"}
        else:  # what a model's modules say counts more than what names look like
            group |= {"embeddings": "same"}
        if weight_decay is not None:
            group["weight_decay"] = 0.0 if is_vector else weight_decay
        result.append(group)
    return result
