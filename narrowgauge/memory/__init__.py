"""Memory savers for any training loop; they cost compute time or exactness.

freeze, train_only     parameters without gradient and optimizer state; optionally as codes
thaw                   convert frozen codes back to 16-bit weights
checkpoint             recompute blocks in backward instead of saving their activations
cheapest               choose the cheapest checkpointing policy that fits, by counted bytes
compile_blocks         compile each block separately, for checkpointing in segments
compress_activations   store the blocks' saved activations in 8 bits
offload                store the blocks' saved activations in host memory
chunked_cross_entropy  output head and loss without the full logits
saved_bytes            measure the bytes that a forward pass saves for backward
"""

from narrowgauge.memory.blocks import compile_blocks, find_blocks
from narrowgauge.memory.checkpointing import CheckpointReport, Choice, cheapest, checkpoint
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
