"""What trades time or exactness for bytes, usable in any training loop.

freeze, train_only       parameters that do not train: no gradient, no optimizer state, less backward; as codes, half the weight or less
thaw                     such codes as 16-bit weights again
checkpoint               blocks that are computed again in backward instead of being kept
cheapest                 which way of it is the cheapest that fits, by counted bytes
compile_blocks           each block compiled by itself, for segments of them
compress_activations     what blocks keep for backward, in 8 bits
offload                  what blocks keep for backward, in host memory
chunked_cross_entropy    output head and loss without the whole logits
saved_bytes              what a forward pass keeps for backward, measured
"""

from narrowgauge.memory.blocks import compile_blocks, find_blocks
from narrowgauge.memory.cheapest import Choice, cheapest
from narrowgauge.memory.checkpointing import CheckpointReport, checkpoint
from narrowgauge.memory.compression import Compression, compress_activations
from narrowgauge.memory.freezing import FreezeReport, freeze, thaw, train_only
from narrowgauge.memory.loss import chunked_cross_entropy
from narrowgauge.memory.measure import SavedBytes, saved_bytes
from narrowgauge.memory.offloading import Offload, offload

__all__ = [
    "CheckpointReport", "Choice", "Compression", "FreezeReport", "Offload", "SavedBytes", "cheapest", "checkpoint",
    "chunked_cross_entropy", "compile_blocks", "compress_activations", "find_blocks", "freeze", "offload", "saved_bytes", "thaw",
    "train_only",
]  # fmt: skip
