"""The trained model as a Hugging Face folder, whole or not there, also after a power cut."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor
from transformers.utils import logging as progress

from narrowgauge import storage
from narrowgauge.errors import CheckpointError
from narrowgauge.train.checkpoint import state
from narrowgauge.train.trainer import Trainer


def export(trainer: Trainer, folder: Path) -> None:
    """Writes model and tokenizer to `folder`; replaces an older one. Weights: the best by the run's metric, else the last."""
    draft = folder.with_name(f".tmp-{folder.name}")  # the run folder's lock keeps others away
    own, _ = state.split_scaling(trainer.model.state_dict())
    best = trainer.best.weights()
    weights = own if best is None else best
    if {name: weight.shape for name, weight in weights.items()} != {name: weight.shape for name, weight in own.items()}:
        raise CheckpointError(
            f"{trainer.best.path(trainer.best.step)}: its {len(weights)} weights are not the {len(own)} of this model. "
            "Restore it; or remove it and resume, to export the last weights."
        )
    with storage.refusals("write the trained model to", folder):
        storage.remove(draft)
        try:
            _write_pretrained(draft, trainer, weights)
            storage.flush_tree(draft)
            storage.replace_folder(draft, folder)
        except BaseException:
            storage.remove(draft)
            raise


def _write_pretrained(folder: Path, trainer: Trainer, weights: dict[str, Tensor]) -> None:
    """OSError if the disk refuses; safetensors and tokenizers tell that in exceptions of their own, by words alone."""
    shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()  # transformers draws one for every file
    try:
        trainer.model.save_pretrained(folder, state_dict=weights)
        trainer.task.tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
    finally:
        if shown:
            progress.enable_progress_bar()
