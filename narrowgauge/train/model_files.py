"""Model folders: those of others are refused before transformers opens them if they would run code; the trained model is written whole.

transformers loads safetensors when told to, but takes file names from the folder itself: an index may name a pickle, the
configuration another file of weights, an adapter a pickle of its own, or attention a kernel that is downloaded and run.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from transformers.utils import cached_file, logging

from narrowgauge import storage
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.storage import reading
from narrowgauge.train.checkpoint.store import Best

INDEX = "model.safetensors.index.json"
PLAIN = re.compile(r"[^/\\]+\.safetensors")
NEXT = "Pass a folder or hub name of a model whose weights are safetensors and whose code is part of transformers."
OF_MODELS = reading.Kind(most_bytes=reading.GIB, step=NEXT, follow_links=True)  # the Hub's cache has links


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and its table of what it did not find: what matters of it is said here."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def refuse_foreign_code(where: str, sizes: Any) -> None:
    """ConfigError for a model `where`, a folder or hub name, that would run code. sizes: its configuration."""
    for part in (sizes, *(getattr(sizes, key, None) for key in getattr(sizes, "sub_configs", {}))):
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, key, None) or ""):
                raise _refusal(where, "config.json", f"asks for the kernel {getattr(part, key)!r}, code from the Hub")
    weights = getattr(sizes, "transformers_weights", None)
    if weights is not None and not PLAIN.fullmatch(str(weights).removesuffix(".index.json")):
        raise _refusal(where, "config.json", f"names the weights {weights!r}, which is no safetensors file beside it")
    for name in {INDEX, *([str(weights)] if str(weights).endswith(".index.json") else [])}:
        path = file_of(where, name)
        if path is not None:
            _refuse_index(where, name, path)
    if file_of(where, "adapter_config.json") and not file_of(where, "adapter_model.safetensors"):
        raise _refusal(where, "adapter_config.json", "belongs to an adapter without adapter_model.safetensors")


def _refuse_index(where: str, name: str, path: Path) -> None:
    index = reading.json_of(path, OF_MODELS)
    try:
        files = set(index["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise _refusal(where, name, f"is no index of weights: {type(error).__name__}: {error}") from error
    for file in sorted(map(str, files)):
        if not PLAIN.fullmatch(file):
            raise _refusal(where, name, f"names the weights {file!r}, which is no safetensors file beside it")


def file_of(where: str, name: str) -> Path | None:
    """The file of a folder, or of a hub model, downloaded if need be; None if there is none."""
    if Path(where).is_dir():
        path = Path(where) / name
        return path if os.path.lexists(path) else None
    reasons = ("missing_entries", "connection_errors", "gated_repo")
    found = cached_file(where, name, **{f"_raise_exceptions_for_{reason}": False for reason in reasons})
    return None if found is None else Path(found)


def _refusal(where: str, name: str, words: str) -> ConfigError:
    return ConfigError(f"model = {where!r}: {name} {words}. {NEXT}")


def export(
    model: Any, shapes: Mapping[str, Size], weights: dict[str, Tensor], tokenizer: Any, best: Best, folder: Path
) -> None:
    """Writes model and tokenizer to `folder`, which is whole or not there, also after a power cut; replaces an older one.

    model, shapes  tells what is written beside the weights; of all of its weights, though this rank may hold a stage alone
    weights        ordinary tensors, the best by the run's metric or the last
    """
    draft = folder.with_name(f".tmp-{folder.name}")  # the run folder's lock keeps others away
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise CheckpointError(
            f"{best.path(best.step)}: its {len(weights)} weights are not the {len(shapes)} of this model. "
            "Restore it; or remove it and resume, to export the last weights."
        )
    with storage.refusals("write the trained model to", folder), storage.new_folder(folder, draft):
        with quiet(), _storage_errors(draft):
            model.save_pretrained(draft, state_dict=weights)
            tokenizer.save_pretrained(draft)
        readable = (draft / "config.json").stat().st_mode
        for path in draft.glob("*.safetensors"):  # which safetensors writes for the owner alone, whatever the umask
            path.chmod(readable)
        storage.flush_tree(draft)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """OSError if the disk refuses: safetensors and tokenizers tell that in exceptions of their own, by words alone."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
