"""Samples of a decoder at an evaluation, which never change the run.

Samples use their own random generator. They are generated without a KV cache: the whole context is
recomputed for each token, which takes a few seconds for a small model. The model is in evaluation
mode.
"""

from typing import Any

import torch

TEMPERATURE = 0.8
TOP_K = 40
NOT_FINITE = " [ended here: the next logits were not finite]"


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, start: str | list[int], tokens: int, *, longest: int, seed: int
) -> str:
    """Samples up to `tokens` tokens after `start`, and returns their text without `start`.

    start    a text, or token ids
    longest  most tokens of the context; older tokens are dropped
    seed     seed of a private generator

    Temperature 0.8, top-k 40. Generation ends at the end-of-text token or at non-finite logits.
    """
    if isinstance(start, str):
        start = tokenizer(start, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    device = next(model.parameters()).device
    # A private CPU generator: the run's own generators must not advance, and a GPU draws other
    # numbers.
    generator = torch.Generator().manual_seed(seed)
    ids, ending = list(start), ""
    for _ in range(tokens):
        context = torch.tensor([ids[-longest:]], device=device)
        # Cut to the tokenizer's size: embeddings may be padded with rows that no token has.
        logits = (
            model(input_ids=context, use_cache=False).logits[0, -1, : len(tokenizer)].float().cpu()
        )
        if not logits.isfinite().all():
            ending = NOT_FINITE
            break
        best = torch.topk(logits / TEMPERATURE, min(TOP_K, len(logits)))
        choice = torch.multinomial(torch.softmax(best.values, 0), 1, generator=generator)
        ids.append(int(best.indices[choice]))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[len(start) :], skip_special_tokens=True)) + ending
