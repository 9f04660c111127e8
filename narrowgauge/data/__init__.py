"""Text to batches: read documents strictly, tokenize them once, and give batches as a pure function of the step.

trained = train_bpe((document.text for document in documents("stdlib")), 4096, cache)
corpus = prepare("stdlib", trained.tokenizer, cache=cache)
batches = CausalBatches(corpus.train, sequence_length=256, batch_size=8, seed=0)
batches.batch(step)["input_ids"]
"""

from narrowgauge.data.batches import IGNORED, CausalBatches, valid_targets
from narrowgauge.data.cache import TokenStream
from narrowgauge.data.corpus import Corpus, check_vocabulary, prepare
from narrowgauge.data.sources import documents
from narrowgauge.data.text import Document
from narrowgauge.data.tokenizer import TrainedTokenizer, fingerprint, load, train_bpe

__all__ = [
    "IGNORED",
    "CausalBatches",
    "Corpus",
    "Document",
    "TokenStream",
    "TrainedTokenizer",
    "check_vocabulary",
    "documents",
    "fingerprint",
    "load",
    "prepare",
    "train_bpe",
    "valid_targets",
]
