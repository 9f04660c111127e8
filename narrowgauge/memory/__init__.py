"""What trades time or exactness for bytes, usable in any training loop.

freeze, train_only       parameters that do not train: no gradient, no optimizer state, less backward; as codes, half the weight or less
thaw                     such codes as 16-bit weights again
checkpoint               blocks that are computed again in backward instead of being kept
compress_activations     what blocks keep for backward, in 8 bits
offload                  what blocks keep for backward, in host memory
chunked_cross_entropy    output head and loss without the whole logits
saved_bytes              what a forward pass keeps for backward, measured
"""

from narrowgauge.memory.blocks import find_blocks
from narrowgauge.memory.checkpointing import CheckpointReport, checkpoint
from narrowgauge.memory.compression import Compression, compress_activations
from narrowgauge.memory.freezing import FreezeReport, freeze, thaw, train_only
from narrowgauge.memory.loss import chunked_cross_entropy
from narrowgauge.memory.measure import SavedBytes, saved_bytes
from narrowgauge.memory.offloading import Offload, offload

__all__ = [
    "CheckpointReport", "Compression", "FreezeReport", "Offload", "SavedBytes", "checkpoint", "chunked_cross_entropy",
    "compress_activations", "find_blocks", "freeze", "offload", "saved_bytes", "thaw", "train_only",
]  # fmt: skip
