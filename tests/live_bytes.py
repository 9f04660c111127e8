"""Memory of tensors, counted by what operations return: the same on every machine, unlike a process's size."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Most bytes of storages that were alive at once, of all that operations returned."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if sum(size for _, size in self.alive.values()) > self.peak:
            self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return found
