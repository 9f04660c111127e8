"""Where torch.compile and Triton keep what they built: in a folder of the user's own.

Both run what they find there, and torch.compile unpickles it. Its default is a folder in the shared temporary folder, under a name
that anybody can take first. The C++ kernels of narrowgauge are kept in the same place (`narrowgauge.ops.cpp.build`).

Inductor's folder has the CPU's capability in its name: Inductor (2.13) finds a kernel again by its graph alone, and one made for AVX512
and met under ATEN_CPU_CAPABILITY=avx2 left half of its lanes unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from narrowgauge import storage
from narrowgauge.errors import ConfigError
from narrowgauge.ops.cpp.build import cache_folder, user_cache


def folder_names() -> dict[str, str]:
    """Variable -> the folder's name within the user's own cache."""
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    return {"TORCHINDUCTOR_CACHE_DIR": f"inductor-{capability}", "TRITON_CACHE_DIR": "triton"}


def use_own_caches(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Sets the variables in `environment`, os.environ for this process; one that is set already is respected and checked.

    Yields a sentence for each folder that is not below the user's own cache.
    Raises ConfigError if others may write to a folder, whoever named it.
    """
    user, reason = user_cache()
    for variable, name in folder_names().items():
        own = (cache_folder() if reason else user) / name
        folder = Path(environment.get(variable) or own)
        if shared := storage.refuse_shared(folder):
            raise ConfigError(
                f"{variable} = '{folder}': what is compiled is kept there and run from there, but {shared}. "
                f"Name a folder of your own with mode 0700, or unset {variable}."
            )
        environment[variable] = str(folder)
        if folder != own:
            yield f"compiled code is kept in {folder}, as {variable} says."
        elif reason:
            yield f"compiled code is kept for this run alone: {user} cannot be used, for {reason}."
