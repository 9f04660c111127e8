"""The folders of a trained model, RUN/final and RUN/merged, written whole or not at all.

final/    the model in the format of transformers; of a run with adapters, the adapter in that of
          peft
merged/   the model with its adapters added, in the format of transformers
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor

from narrowgauge import storage
from narrowgauge.errors import CheckpointError
from narrowgauge.train import adapter
from narrowgauge.train.checkpoint import state
from narrowgauge.train.model_files import quiet

if TYPE_CHECKING:
    from narrowgauge.train.checkpoint.store import Best


def export(
    model: Any,
    shapes: Mapping[str, Size],
    weights: dict[str, Tensor],
    tokenizer: Any,
    best: Best,
    folder: Path,
) -> None:
    """Writes model and tokenizer to `folder`, atomically even on a power cut.

    Replaces an older export.

    model    class and configuration; this rank may hold only one pipeline stage of its weights
    shapes   name -> shape of every weight of the whole model
    weights  plain tensors, the best by the run's metric or the last ones
    """
    # The lock of the run folder excludes other writers
    draft = folder.with_name(f".tmp-{folder.name}")
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise CheckpointError(
            f"{best.path(best.step)}: its {len(weights)} weights are not the {len(shapes)} of this model. "
            "Restore it; or remove it and resume, to export the last weights.",
            code="model.best-weights",
        )
    with storage.refusals("write the trained model to", folder), storage.new_folder(folder, draft):
        _write_model(model, weights, tokenizer, draft)


def export_merged(model: Any, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> str:
    """Adds the adapters of a model to its base and writes it to `folder`, atomically as `export`.

    weights  of the adapters, the best by the run's metric or the last ones

    The model has no adapters afterwards. Where the base is codes, the folder holds what the merged
    weights' new codes decode to. Returns a sentence on what survived the rounding. Memory: the
    whole model in its 16-bit or 32-bit dtype, while the files are written.
    """
    state.load_state(model, {**state.saved_state(model), **weights})
    report = adapter.merge(model)
    # Codes of a merged weight stand beside the weight that they decode to, which is written.
    whole, _ = state.split_scaling(model.state_dict())
    kept = {name: each for name, each in whole.items() if ".frozen." not in name}
    draft = folder.with_name(f".tmp-{folder.name}")
    with storage.refusals("write the merged model to", folder), storage.new_folder(folder, draft):
        _write_model(model, kept, tokenizer, draft)
    return str(report)


def _write_model(model: Any, weights: Mapping[str, Tensor], tokenizer: Any, draft: Path) -> None:
    with quiet(), storage.library_errors(draft):
        if state.adapter_weights(model) is None:
            model.save_pretrained(draft, state_dict=dict(weights))
        else:
            storage.make_folder(draft)
            adapter.write(model, weights, draft)
        tokenizer.save_pretrained(draft)
    readable = next(draft.glob("*config.json")).stat().st_mode
    # safetensors creates files with mode 0600, whatever the umask
    for path in draft.glob("*.safetensors"):
        path.chmod(readable)
    # transformers, safetensors and tokenizers never sync: after a power cut, final/ held empty
    # files.
    storage.flush_tree(draft)
