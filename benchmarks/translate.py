"""Does an encoder-decoder learn to translate in few bits? Multi30k, English to German, from scratch, BLEU by sacrebleu.

    python -m benchmarks.translate --data MULTI30K_FOLDER

The folder holds train.en, train.de, val.en and val.de (lower-cased, tokenized). A Marian model of 2 + 2 layers and width 192
with a joint BPE; every Linear but the output head follows the recipe, the rest is float32. Greedy decoding with the quantized
forward; BLEU on the tokenized validation set.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize

RECIPES = ("fp32", "int4-hq-bs", "int4-hq-lss", "int4-lsq-luq")
METRICS = ("bleu", "loss")
VOCABULARY = 4000
WIDTH = 192
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
LONGEST = 48  # tokens of a sentence; 60 of the 29,000 pairs are longer and are cut
SORTED_TOGETHER = (
    50  # batches whose sentences are sorted by length before they are cut, then shuffled
)


def main() -> None:
    options = _options()
    settings = {
        "data": str(options.data), "epochs": options.epochs, "batch_size": options.batch_size,
        "learning_rate": options.learning_rate, "pairs": options.pairs,
    }  # fmt: skip
    experiment = Experiment(train, options.recipes, options.seeds, settings, options.output)
    rows = summarize(experiment.results(options.jobs), METRICS, options.recipes[0])
    shown = {name: value for name, value in settings.items() if name != "data"}
    record("translate", [row | {"settings": shown} for row in rows], options.results)
    print(markdown(rows, METRICS, places=2))


def train(
    recipe: str,
    seed: int,
    data: str,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    pairs: int,
) -> dict[str, float]:
    """One run from scratch; BLEU and loss (nats per token) on the validation set, and the seconds of training."""
    import torch

    import narrowgauge as ng

    torch.set_num_threads(1)
    corpus = {name: (Path(data) / name).read_text(encoding="utf-8").splitlines() for name in
              ("train.en", "train.de", "val.en", "val.de")}  # fmt: skip
    tokenizer = bpe(corpus["train.en"] + corpus["train.de"])
    encoded = {
        name: [encoding.ids for encoding in tokenizer.encode_batch(lines)]
        for name, lines in corpus.items()
    }
    training = list(zip(encoded["train.en"], encoded["train.de"], strict=True))[: pairs or None]
    torch.manual_seed(seed)
    model = build(tokenizer)
    if recipe != "fp32":
        ng.convert(model, recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    steps = -(-len(training) // batch_size) * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    started_at_s = time.monotonic()
    model.train()
    for epoch in range(epochs):
        for part in batches(training, batch_size, seed=1000 * seed + epoch):
            loss_of(model, part, smoothing=0.1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ng.advance(model)
            schedule.step()
            optimizer.zero_grad()
    spent_s = time.monotonic() - started_at_s
    validation = list(zip(encoded["val.en"], encoded["val.de"], strict=True))
    return {**evaluate(model, tokenizer, validation, corpus["val.de"]), "train_s": spent_s}


def bpe(lines: list[str], vocabulary: int = VOCABULARY) -> Any:
    """A joint BPE over both languages, cutting at spaces; the pieces of a decoded word join again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[PAD, END, UNKNOWN], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def build(tokenizer: Any) -> Any:
    from transformers import MarianConfig, MarianMTModel

    padding = tokenizer.token_to_id(PAD)
    return MarianMTModel(
        MarianConfig(
            vocab_size=tokenizer.get_vocab_size(), d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=512,
            decoder_ffn_dim=512, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64,
            dropout=0.1, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=padding,
            decoder_start_token_id=padding, eos_token_id=tokenizer.token_to_id(END), forced_eos_token_id=None,
            scale_embedding=True, share_encoder_decoder_embeddings=True,
            # Marian's own 0.02 leaves positions louder than words: after 4 epochs the decoder still ignored the source.
            init_std=WIDTH**-0.5,
        )
    )  # fmt: skip


def batches(pairs: list[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Every pair once, in batches of similar lengths and random order."""
    shuffle = random.Random(seed)
    order = shuffle.sample(range(len(pairs)), len(pairs))
    cut = []
    for start in range(0, len(order), size * SORTED_TOGETHER):
        near = sorted(
            order[start : start + size * SORTED_TOGETHER], key=lambda index: len(pairs[index][1])
        )
        cut += [near[first : first + size] for first in range(0, len(near), size)]
    shuffle.shuffle(cut)
    return ([pairs[index] for index in part] for part in cut)


def padded(rows: list[list[int]], padding: int) -> Any:
    import torch

    longest = max(map(len, rows))
    return torch.tensor([row + [padding] * (longest - len(row)) for row in rows])


def loss_of(model: Any, part: list[Any], smoothing: float) -> Any:
    """Mean cross entropy per target token."""
    import torch

    padding = model.config.pad_token_id
    source, target = (
        padded([source for source, _ in part], padding),
        padded([target for _, target in part], padding),
    )
    begun = torch.nn.functional.pad(target[:, :-1], (1, 0), value=padding)
    logits = model(
        input_ids=source, attention_mask=source != padding, decoder_input_ids=begun
    ).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=padding, label_smoothing=smoothing
    )


def evaluate(
    model: Any, tokenizer: Any, pairs: list[Any], references: list[str]
) -> dict[str, float]:
    import sacrebleu
    import torch

    model.eval()
    padding = model.config.pad_token_id
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]))
    found = [""] * len(pairs)
    nats = tokens = 0.0
    with torch.no_grad():
        for first in range(0, len(order), 64):
            near = order[first : first + 64]
            part = [pairs[index] for index in near]
            count = sum(len(target) for _, target in part)
            nats += float(loss_of(model, part, smoothing=0.0)) * count
            tokens += count
            source = padded([source for source, _ in part], padding)
            written = model.generate(
                input_ids=source,
                attention_mask=source != padding,
                max_new_tokens=LONGEST,
                num_beams=1,
                do_sample=False,
            )
            for index, text in zip(near, tokenizer.decode_batch(written.tolist()), strict=True):
                found[index] = text
    bleu = sacrebleu.corpus_bleu(found, [references], tokenize="none", force=True)
    return {"bleu": bleu.score, "loss": nats / tokens}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.translate", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.en, train.de, val.en, val.de"
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help="the first is the reference of the pairs",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--pairs", type=int, default=0, help="train on the first so many; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/translate"))
    parser.add_argument("--results", type=Path, default=RESULTS / "translate.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
