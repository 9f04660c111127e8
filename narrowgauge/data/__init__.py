"""Reads text, tables and images strictly, tokenizes once, and yields deterministic batches.

Running text, for pretraining:

    trained = train_bpe((document.text for document in documents("stdlib")), 4096, cache)
    corpus = prepare("stdlib", trained.tokenizer, cache=cache)
    batches = CausalBatches(corpus.train, sequence_length=256, batch_size=8, seed=0)
    batches.batch(step)["input_ids"]

Examples in rows, for fine-tuning, of the tasks in `narrowgauge.train.tasks`:

    examples = prepare_examples("train.jsonl", Chat(), tokenizer, cache=cache)
    sampler = LengthBatchSampler(examples.lengths, Batching(token_budget=4096))
    collate = Collator(pad_id=pad_id_of(tokenizer), widths=sampler.widths)
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)

Batches are a pure function of the step, so a resumed run continues exactly.

A name is imported when it is first used: what reads files needs no torch, and the command line
checks data before it imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.data.batches import IGNORED, CausalBatches, valid_targets, without_targets
    from narrowgauge.data.cache import TokenStream
    from narrowgauge.data.collate import Collator, PackingCheck, check_packing, pad_id_of
    from narrowgauge.data.corpus import Corpus, check_vocabulary, prepare
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.epochs import Batching, EpochPlan, plan
    from narrowgauge.data.examples import Examples, Limits, coloured_sample, prepare_examples
    from narrowgauge.data.image_sizes import Preprocessing
    from narrowgauge.data.rows import PaddingReport, Waste, block_mask, cumulative_lengths, pack
    from narrowgauge.data.sampler import LengthBatchSampler, restore_order, sorted_batches
    from narrowgauge.data.sources import documents, records, understood
    from narrowgauge.data.tables import Record
    from narrowgauge.data.task import Task
    from narrowgauge.data.text import Document
    from narrowgauge.data.tokenizer import TrainedTokenizer, fingerprint, load, train_bpe

__all__ = [
    "IGNORED",
    "Batching",
    "CausalBatches",
    "Chat",
    "Choices",
    "Classification",
    "Collator",
    "Completion",
    "Corpus",
    "Document",
    "Encoder",
    "EpochPlan",
    "Examples",
    "ImageBatches",
    "Images",
    "LengthBatchSampler",
    "Limits",
    "PackingCheck",
    "PaddingReport",
    "Preprocessing",
    "Questions",
    "Record",
    "Regression",
    "Seq2Seq",
    "Tagging",
    "Task",
    "TokenStream",
    "TrainedTokenizer",
    "Waste",
    "block_mask",
    "check_packing",
    "check_vocabulary",
    "coloured_sample",
    "count_targets",
    "cumulative_lengths",
    "documents",
    "fingerprint",
    "load",
    "pack",
    "pad_id_of",
    "plan",
    "prepare",
    "prepare_examples",
    "prepare_images",
    "records",
    "restore_order",
    "sorted_batches",
    "squared_loss",
    "step_loss",
    "summed_loss",
    "train_bpe",
    "trainer_loss",
    "understood",
    "valid_targets",
    "without_targets",
]  # fmt: skip

# Module of this package -> its names. None of these names is that of a module: importing the module
# would hide the name.
_HOMES = {
    "batches": ("IGNORED", "CausalBatches", "valid_targets", "without_targets"),
    "cache": ("TokenStream",),
    "collate": ("Collator", "PackingCheck", "check_packing", "pad_id_of"),
    "corpus": ("Corpus", "check_vocabulary", "prepare"),
    "encoder": ("Encoder",),
    "examples": ("Examples", "Limits", "coloured_sample", "prepare_examples"),
    "image_sizes": ("Preprocessing",),
    "epochs": ("Batching", "EpochPlan", "plan"),
    "rows": ("PaddingReport", "Waste", "block_mask", "cumulative_lengths", "pack"),
    "sampler": ("LengthBatchSampler", "restore_order", "sorted_batches"),
    "sources": ("documents", "records", "understood"),
    "tables": ("Record",),
    "task": ("Task",),
    "text": ("Document",),
    "tokenizer": ("TrainedTokenizer", "fingerprint", "load", "train_bpe"),
}
# Module of `narrowgauge.train.tasks` -> its names that this package had before. A file of a task has
# its columns, loss and metrics together, and such a file imports this package.
_MOVED = {
    "causal_lm": ("Chat", "Completion"),
    "classification": ("Classification",),
    "image_classification": ("ImageBatches", "Images", "prepare_images"),
    "losses": ("count_targets", "step_loss", "summed_loss", "trainer_loss"),
    "multiple_choice": ("Choices",),
    "question_answering": ("Questions",),
    "regression": ("Regression", "squared_loss"),
    "seq2seq": ("Seq2Seq",),
    "tagging": ("Tagging",),
}


def __getattr__(name: str) -> Any:
    own = next((module for module, names in _HOMES.items() if name in names), "")
    moved = next((module for module, names in _MOVED.items() if name in names), "")
    if not own and not moved:
        raise AttributeError(f"module 'narrowgauge.data' has no attribute {name!r}")
    home = f"narrowgauge.data.{own}" if own else f"narrowgauge.train.tasks.{moved}"
    # Stored as a global, so that this function runs once for each name.
    globals()[name] = value = getattr(import_module(home), name)
    return value
