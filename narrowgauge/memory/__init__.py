"""What trades time or exactness for bytes, usable in any training loop.

freeze, train_only       parameters that do not train: no gradient, no optimizer state, less backward
checkpoint               blocks that are computed again in backward instead of being kept
chunked_cross_entropy    output head and loss without the whole logits
saved_bytes              what a forward pass keeps for backward, measured
"""

from narrowgauge.memory.checkpointing import CheckpointReport, checkpoint
from narrowgauge.memory.freezing import FreezeReport, freeze, train_only
from narrowgauge.memory.loss import chunked_cross_entropy
from narrowgauge.memory.measure import SavedBytes, saved_bytes

__all__ = [
    "CheckpointReport",
    "FreezeReport",
    "SavedBytes",
    "checkpoint",
    "chunked_cross_entropy",
    "freeze",
    "saved_bytes",
    "train_only",
]
