"""A sample of what the model writes, from a generator of its own: sampling changes nothing in the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TEMPERATURE = 0.8
TOP_K = 40
NOT_FINITE = " [ended here: the next logits were not finite]"


def sample(model: Any, tokenizer: Any, prompt: str, tokens: int, *, longest: int, seed: int) -> str:
    """`tokens` tokens that continue `prompt`, decoded without the prompt; the model is left in the mode it was in.

    Temperature 0.8 among the 40 likeliest tokens. Recomputes the whole context for each token (no cache): a few seconds
    for a small model. The context is the last `longest` tokens.
    """
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    return continued(model, tokenizer, start, tokens, longest=longest, seed=seed)


@torch.no_grad()
def continued(model: Any, tokenizer: Any, start: Sequence[int], tokens: int, *, longest: int, seed: int) -> str:
    """The same behind these ids."""
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        ids = list(start)
        for _ in range(tokens):
            context = torch.tensor([ids[-longest:]], device=device)
            logits = model(input_ids=context, use_cache=False).logits[0, -1, : len(tokenizer)].float().cpu()
            if not logits.isfinite().all():
                return tokenizer.decode(ids[len(start) :], skip_special_tokens=True) + NOT_FINITE
            best = torch.topk(logits / TEMPERATURE, min(TOP_K, len(logits)))
            choice = torch.multinomial(torch.softmax(best.values, 0), 1, generator=generator)
            ids.append(int(best.indices[choice]))
            if ids[-1] == tokenizer.eos_token_id:
                break
        return tokenizer.decode(ids[len(start) :], skip_special_tokens=True)
    finally:
        model.train(was_training)
