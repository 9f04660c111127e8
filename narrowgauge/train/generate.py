"""A sample of what the model writes, from a generator of its own: sampling changes nothing in the run.

The whole context is computed again for each token (no cache): a few seconds for a small model. The model is in evaluation mode.
"""

from typing import Any

import torch

TEMPERATURE = 0.8
TOP_K = 40
NOT_FINITE = " [ended here: the next logits were not finite]"


@torch.no_grad()
def sample(model: Any, tokenizer: Any, start: str | list[int], tokens: int, *, longest: int, seed: int) -> str:
    """`tokens` tokens that continue `start`, a text or its ids, decoded without it.

    Temperature 0.8 among the 40 likeliest tokens. The context is the last `longest` tokens.
    """
    if isinstance(start, str):
        start = tokenizer(start, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids, ending = list(start), ""
    for _ in range(tokens):
        context = torch.tensor([ids[-longest:]], device=device)
        logits = model(input_ids=context, use_cache=False).logits[0, -1, : len(tokenizer)].float().cpu()
        if not logits.isfinite().all():
            ending = NOT_FINITE
            break
        best = torch.topk(logits / TEMPERATURE, min(TOP_K, len(logits)))
        choice = torch.multinomial(torch.softmax(best.values, 0), 1, generator=generator)
        ids.append(int(best.indices[choice]))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[len(start) :], skip_special_tokens=True)) + ending


@torch.no_grad()
def greedy(model: Any, source: list[int], tokens: int) -> list[int]:
    """At most `tokens` ids that an encoder-decoder writes for `source`, each the likeliest; the encoder runs once."""
    ids = [model.config.decoder_start_token_id]
    inputs = torch.tensor([source], device=next(model.parameters()).device)
    states = model.get_encoder()(input_ids=inputs)
    mask = torch.ones_like(inputs)
    for _ in range(tokens):
        decoder = torch.tensor([ids], device=inputs.device)
        output = model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=decoder, use_cache=False)
        ids.append(int(output.logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[1:]
