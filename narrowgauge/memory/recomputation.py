"""Recompute a forward pass under its original random generators and autocast settings.

`checkpointed` is torch's non-reentrant checkpoint, except that generator states are saved here, so
that their bytes can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from narrowgauge.addresses import dry_run_on
from narrowgauge.memory.saved_tensors import report_saved
from narrowgauge.ops import rng


class RngAndAutocast:
    """Snapshot of torch's generators and autocast settings, for a call with the given tensors.

    A CPU generator's state takes 5 KB, a GPU generator's 16 bytes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {
            tensor.device: tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")
        }
        kinds = sorted({device.type for device in devices})
        # fork_rng's default device type; without GPU tensors no device state is saved.
        self._kind = kinds[0] if kinds else "cuda"
        self._generators = rng.TorchStates(list(devices.values()), self._kind)
        device = dry_run_on()
        if not kinds and (device is None or device.type == "cpu"):
            # On a CPU the state occupies the same memory as the activations.
            report_saved(self._generators.cpu)
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *kinds)
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot inside this context, and the present state afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self._generators.restored())
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                )
            yield


def checkpointed(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Callable[[], Any] | None = None
) -> Any:  # fmt: skip
    """Run `forward`, save its arguments, and recompute it from them in backward.

    contexts  torch.utils.checkpoint's context_fn
    """
    options: dict[str, Any] = {"use_reentrant": False} | (
        {"context_fn": contexts} if contexts else {}
    )
    if torch.compiler.is_compiling():
        # While torch.compile traces, torch's own checkpoint preserves the generators.
        return checkpoint(forward, *args, preserve_rng_state=True, **options, **kwargs)
    snapshot = RngAndAutocast(
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
    )
    calls = 0

    def recomputable(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        # The first call is forward; later ones are recomputations.
        if calls == 1:
            return forward(*args, **kwargs)
        with snapshot.restored():
            return forward(*args, **kwargs)

    return checkpoint(recomputable, *args, preserve_rng_state=False, **options, **kwargs)
