"""`narrowgauge train` with a fault: python faulty_run.py FAULT RANK STEP train ...; the fault comes before that step, on that rank.

kill     SIGKILL, as of the out-of-memory killer
hang     SIGSTOP
data     its micro-batches cannot be read
disk     the log's file system is full
full     no file may grow beyond a few bytes, as of a full disk or a quota
weight   a weight changes by its last bit
nan      a weight becomes NaN
spoil    all weights of a layer change their sign
overflow one gradient of float16 is infinite
norm     the last norm, which ranks that share products hold alike, changes by its last bit
features the features of this rank in a layer pass the largest float
forward  the output of a layer is infinite from here on
backward the gradient of its input is
stop     SIGINT to this process
fail     as `data`, in the first start of torchrun alone
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import sys
from typing import Any

import torch

from narrowgauge import storage
from narrowgauge.cli import main
from narrowgauge.errors import DataError
from narrowgauge.train.trainer import Trainer


def apply(fault: str, trainer: Any) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "stop":
        signal.raise_signal(signal.SIGINT)
    elif fault == "data" or (fault == "fail" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        raise DataError("shard-7.jsonl:12: is not JSON. Correct the line.")
    elif fault == "disk":
        with storage.refusals("append to", trainer.log.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault == "spoil":
        weight = trainer.model.model.layers[1].mlp.down_proj.weight.data
        weight.mul_(-30)
    elif fault == "overflow":
        unscale = trainer.passes.scaler.unscale_

        def overflowed(optimizer: Any) -> None:
            trainer.passes.scaler.unscale_ = unscale
            gradient = trainer.model.model.layers[1].mlp.down_proj.weight.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[3] = (
                float("inf")
            )
            unscale(optimizer)

        trainer.passes.scaler.unscale_ = overflowed
    elif fault == "norm":
        weight = trainer.model.model.norm.weight.data
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    elif fault == "features":
        trainer.model.model.layers[1].mlp.up_proj.weight.data.to_local().fill_(3e38)
    elif fault == "forward":
        norm = trainer.model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, given, output: output * math.inf)
    elif fault == "backward":
        norm = trainer.model.model.layers[1].post_attention_layernorm
        norm.register_full_backward_hook(lambda module, given, _: (given[0] * math.inf,))
    elif fault == "full":
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    elif fault in ("weight", "nan"):
        weight = trainer.model.model.layers[1].mlp.down_proj.weight.data
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight.view(-1)[3] = (
            float("nan")
            if fault == "nan"
            else torch.nextafter(weight.view(-1)[3], torch.tensor(9.0))
        )


def install(fault: str, rank: int, number: int) -> None:
    real = Trainer._optimizer_step

    def step(trainer: Any) -> Any:
        if trainer.ranks.rank == rank and trainer.step + 1 == number:
            apply(fault, trainer)
        return real(trainer)

    Trainer._optimizer_step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    install(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
