"""PyTorch's own databases of modules and optimizers, which its wheel carries in torch.testing._internal.

Their import changes the process: it loads a profile of hypothesis with ten examples, freezes the flags of torch.backends, wraps the
calls of TorchScript and names a cache folder. All of that is put back, so that no other test of the process runs otherwise.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

import hypothesis
import torch


@cache
def torch_databases() -> tuple[ModuleType, ModuleType]:
    """torch.testing._internal.common_modules and common_optimizers; the first call takes 4 s."""
    environment, flag = dict(os.environ), "__allow_nonbracketed_mutation_flag"
    kept = getattr(torch.backends, flag)
    calls = {kind: kind.__call__ for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)}
    try:
        from torch.testing._internal import common_modules, common_optimizers
    finally:
        hypothesis.settings.load_profile("narrowgauge")  # of tests/conftest.py
        setattr(torch.backends, flag, kept)
        for kind, call in calls.items():
            kind.__call__ = call
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    return common_modules, common_optimizers
