"""The trained model as a Hugging Face folder, whole or not there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from torch import Tensor
from transformers.utils import logging as progress

from narrowgauge.train import storage
from narrowgauge.train.checkpoint import state
from narrowgauge.train.trainer import Trainer


def export(trainer: Trainer, folder: Path) -> None:
    """The trained model and tokenizer as a Hugging Face folder that transformers loads; replaces an older one whole.

    The weights are the best ones where the run chooses them by a metric, else those of the last step.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")  # the run folder's lock keeps others away
    weights = trainer.best.weights()
    if weights is None:
        weights, _ = state.split_scaling(trainer.model.state_dict())
    with storage.refusals("write the trained model to", folder):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            _write_pretrained(temporary, trainer, weights)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        storage.sync_folder(folder.parent)


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
