"""Checkpoints of one process: written whole or not at all, and every changed bit is detected.

    step-00000100/
      weights-0.safetensors    tensors of group `weights`, in shards of at most SHARD_BYTES
      optimizer-0.safetensors  ...
      facts.json               everything that is no tensor
      manifest.json            format, step, ties, size and SHA-256 of every other file; its last
                               key hashes itself

Writing: all files go into `.tmp-step-...` in the same parent folder. Each file is synced, the
manifest last, then the folder is synced and renamed, then the parent is synced. A kill or a power
cut at any point leaves the older checkpoints intact, and the new one complete or absent.

Reading: the bytes of a file are read once, hashed, and parsed from memory, so nothing can change
between check and use. There is no pickle. Non-finite weights are neither saved nor loaded. Measured
peak besides the tensors: one shard when reading, two when writing.

Tied weights (two names of one tensor) are stored once and load as one tensor. Tensors that merely
overlap are stored separately.

Not supported: several writers of one folder (the lock of the run folder excludes them), and
asynchronous saves.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from narrowgauge import addresses, manifest, storage
from narrowgauge.diagnose.metrics_table import metric_of
from narrowgauge.errors import CheckpointError, ConfigError, NumericsError
from narrowgauge.manifest import FACTS, NAME, SHARD_BYTES, Manifest
from narrowgauge.storage import reading

Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: tensors on the CPU by group and name, and the JSON facts."""

    step: int
    tensors: Tensors
    facts: dict[str, Any]
    path: Path


# Saving


def save(folder: Path, step: int, tensors: Tensors, facts: dict[str, Any]) -> Path:
    """Writes checkpoint `step` into `folder` and returns its path.

    It is on the disk when this returns.

    StorageError     the file system refuses
    NumericsError    a tensor of group `weights` is not finite
    CheckpointError  a tensor or fact cannot be stored as it is

    After an error nothing is left behind, and older checkpoints are unchanged. A valid checkpoint
    of the same step is replaced.
    """
    if not 0 <= step < 10**8:
        raise CheckpointError(
            f"save: step {step} is not from 0 to 99999999. Count optimizer steps.",
            code="checkpoint.step",
        )
    _refuse_unstorable(tensors)
    ties = {group: _ties(members) for group, members in tensors.items()}
    facts_json = _facts_json(facts)
    final = folder / f"step-{step:08d}"
    with storage.refusals("save a checkpoint in", folder):
        storage.make_folder(folder)
        untied = (
            each
            for group in tensors
            for name, each in tensors[group].items()
            if name not in ties[group]
        )
        total_bytes = sum(tensor.nbytes for tensor in untied)
        storage.require_space(folder, 1.2 * (total_bytes + len(facts_json)), f"checkpoint {step}")
        with storage.new_folder(final, folder / f".tmp-{final.name}-{os.getpid()}") as draft:
            draft.mkdir()
            _write(draft, step, tensors, ties, facts_json)
    return final


def _refuse_unstorable(tensors: Tensors) -> None:
    """Raises an error for tensors that cannot be stored as they are, and for non-finite weights."""
    for group, members in tensors.items():
        if not manifest.GROUP.fullmatch(group):
            raise CheckpointError(
                f"save: group {group!r} is not a lower-case word. Name it as 'weights' or 'optimizer'.",
                code="checkpoint.group",
            )
        for name, tensor in members.items():
            reason = ""
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                reason = f"is a {type(tensor).__name__}, not a plain tensor"
            elif (
                tensor.layout != torch.strided
                or tensor.is_meta
                or str(tensor.dtype).removeprefix("torch.") not in manifest.DTYPES
            ):
                reason = f"is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which safetensors does not hold"
            elif (
                not isinstance(name, str)
                or name == "__metadata__"
                or re.search("[\ud800-\udfff]", name)
            ):
                reason = "is a name that safetensors reserves or cannot hold"
            if reason:
                raise CheckpointError(
                    f"save: {f'{group}: {name}'!r} {reason}. Store plain dense tensors, as `uint8` codes if need be.",
                    code="checkpoint.tensor-kind",
                )
            if group == "weights" and (count := nonfinite(tensor)):
                raise NumericsError(
                    f"refuse to save: weight {name!r} holds {count} values that are not finite, of {tensor.numel()}. "
                    "Resume from the last checkpoint with a lower learning rate or a wider recipe.",
                    code="weights.not-finite",
                )


def nonfinite(tensor: Tensor) -> int:
    """Number of NaN and infinite values.

    One pass without a copy if there are none: aminmax propagates NaN.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0
    values = (
        torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.is_complex()
        else tensor.detach()
    )
    # torch has no isfinite for 8-bit floats
    values = values.float() if values.element_size() == 1 else values
    if all(bool(extreme.isfinite()) for extreme in torch.aminmax(values)):
        return 0
    return int((~values.isfinite()).sum())


def _ties(members: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in members.items():
        # Empty tensors have no address that could identify them.
        if tensor.numel():
            identity = (
                tensor.device,
                tensor.data_ptr(),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            )
            if first.setdefault(identity, name) != name:
                ties[name] = first[identity]
    return ties


def _facts_json(facts: dict[str, Any]) -> bytes:
    try:
        data = json.dumps(facts, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"save: the facts are not JSON: {error}. Store numbers, text, lists and tables.",
            code="checkpoint.facts",
        ) from None
    # JSON turns tuples into lists and int keys into text: refuse facts that would not round-trip.
    if json.loads(data) != facts:
        raise CheckpointError(
            "save: the facts would come back changed. Use lists for tuples and text for keys.",
            code="checkpoint.facts-changed",
        )
    return data


def _write(
    folder: Path, step: int, tensors: Tensors, ties: dict[str, dict[str, str]], facts_json: bytes
) -> None:
    storage.write_synced(folder / FACTS, facts_json)
    files = {FACTS: manifest.listed(facts_json)}
    for group, members in tensors.items():
        for index, shard in enumerate(_shards(members, ties[group])):
            name, data = f"{group}-{index}.safetensors", safetensors.torch.save(shard)
            storage.write_synced(folder / name, data)
            files[name] = manifest.listed(data)
    # The manifest comes last: a folder without it is no checkpoint.
    storage.write_synced(folder / NAME, Manifest(step, list(tensors), ties, files).signed())
    storage.flush(folder)


def _shards(members: Mapping[str, Tensor], ties: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors of a group in shards, on the CPU and in storages of their own.

    Tensors tied to an earlier one are left out.
    """
    shard: dict[str, Tensor] = {}
    taken: set[int] = set()  # addresses of the storages in this shard
    size = 0
    for name, tensor in members.items():
        if name in ties:
            continue
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, taken, size = {}, set(), 0
        # safetensors rejects tensors that share memory within a file.
        shard[name] = addresses.own(tensor, taken)
        size += tensor.nbytes
    if shard:
        yield shard


# Loading


def load(path: Path) -> Checkpoint:
    """Loads the checkpoint at `path`. Raises CheckpointError with the problem if it is damaged."""
    listing = manifest.read(path)
    if listing.save:
        return _of_several_ranks(path, listing)
    tensors: Tensors = {group: {} for group in listing.groups}
    place = FACTS
    try:
        facts = reading.strict_json(manifest.read_file(path, FACTS, listing))
        if not isinstance(facts, dict):
            raise TypeError(f"it holds a {type(facts).__name__}, not a table")
        for place in listing.files:
            if place != FACTS:
                tensors[place.rpartition("-")[0]].update(
                    safetensors.torch.load(manifest.read_file(path, place, listing))
                )
        place = NAME
        for group, ties in listing.ties.items():
            tensors[group].update({name: tensors[group][first] for name, first in ties.items()})
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise CheckpointError(
            f"{path / place}: has the right hash, but not the right contents: {error}. Restore the checkpoint.",
            code="checkpoint.contents",
        ) from error
    refuse_nonfinite(tensors, path)
    return Checkpoint(listing.step, tensors, facts, path)


def _of_several_ranks(path: Path, listing: Manifest) -> Checkpoint:
    """Loads a checkpoint of several ranks as plain tensors."""
    # Lazy: importing torch's checkpoint planners is slow
    from narrowgauge.distributed import storage as ranks

    state = ranks.read(path)
    # In a sharded checkpoint, the facts are an entry called "facts" beside the groups.
    facts = state.pop(FACTS.partition(".")[0], {})
    refuse_nonfinite(state, path)
    return Checkpoint(listing.step, state, facts, path)


def refuse_nonfinite(tensors: Tensors, path: Path) -> None:
    """Raises CheckpointError if a loaded weight holds NaN or infinity."""
    for name, tensor in tensors.get("weights", {}).items():
        if count := nonfinite(tensor):
            raise CheckpointError(
                f"{path}: weight {name!r} holds {count} values that are not finite, of {tensor.numel()}. "
                "Restore the checkpoint, or remove it to go on from an older one.",
                code="weights.not-finite",
            )


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Loads the newest intact checkpoint. Returns (checkpoint or None, [(skipped path, reason)]).

    Returns (None, []) without any checkpoint. Raises CheckpointError if all are damaged: a silent
    restart from step 0 would lose the run. A checkpoint of a newer narrowgauge raises as well.
    """
    skipped: list[tuple[Path, str]] = []
    for path in manifest.newest_first(folder):
        try:
            return load(path), skipped
        except manifest.NewerFormatError:
            raise
        except CheckpointError as error:
            skipped.append((path, str(error)))
    if skipped:
        reasons = "\n".join(f"  {reason}" for _, reason in skipped)
        raise CheckpointError(
            f"{folder}: none of the {len(skipped)} checkpoints is intact. Restore one, or start anew in another --output.\n{reasons}",
            code="checkpoint.none-intact",
        )
    return None, []


# The best weights


class Best:
    """The best weights of a run by one metric, in a folder that checkpoint rotation does not touch.

        RUN/best/step-00000120/      only the group `weights` of a checkpoint

    metric             name of the metric; '' keeps no weights
    step, value, loss  best evaluation so far: its step (0 before the first), metric and loss

    The checkpoints of the run record the best step. Older best weights are removed only after the
    next checkpoint is saved: a run killed in between resumes from the older checkpoint, which still
    needs them.
    """

    def __init__(self, folder: Path, metric: str) -> None:
        self.folder, self.metric = folder, metric
        self.step, self.value, self.loss = 0, math.nan, math.nan

    def take(self, step: int, found: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
        """Saves the weights if this evaluation is the best so far.

        Ties go to the lower loss, then to the earlier step.
        """
        if not self.metric:
            return False
        if self.metric not in found:
            raise ConfigError(
                f"task.best = {self.metric!r}: this evaluation measures {', '.join(map(repr, found))}. Choose one of them, or 'none'.",
                code="train.best",
            )
        value = float(found[self.metric])
        sign = -1 if metric_of(self.metric).lower_is_better else 1
        loss = float(found.get("loss", math.nan))
        # Comparisons with the initial NaN are false, so the first evaluation is accepted by
        # `self.step` below.
        is_better = sign * value > sign * self.value or (value == self.value and loss < self.loss)
        if not math.isfinite(value) or (self.step and not is_better):
            return False
        self.save(step, dict(weights), {"metric": self.metric, "value": value})
        self.step, self.value, self.loss = step, value, loss
        return True

    def save(self, step: int, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
        save(self.folder, step, {"weights": weights}, facts)

    def verify(self, path: Path) -> None:
        manifest.verify(path)

    def facts(self) -> dict[str, Any] | None:
        """Facts for a checkpoint; None before the first evaluation.

        A non-finite loss becomes None, as JSON has no NaN.
        """
        loss = self.loss if math.isfinite(self.loss) else None
        return {"step": self.step, "value": self.value, "loss": loss} if self.step else None

    def restore(self, facts: Mapping[str, Any] | None) -> str:
        """Restores the best step from a checkpoint's facts.

        Returns the reason if its weights are lost, or ''.
        """
        if not facts or not self.metric:
            return ""
        step, loss = facts["step"], facts.get("loss")
        try:
            self.verify(self.path(step))
        except CheckpointError as error:
            return f"the best weights, of step {step}, are lost: {error} The best of the steps to come is kept."
        self.step, self.value, self.loss = step, facts["value"], math.nan if loss is None else loss
        return ""

    def clear(self) -> None:
        """Removes all weights but the best."""
        if self.step:
            manifest.prune(self.folder, keep=self.path(self.step))

    def weights(self) -> dict[str, Tensor] | None:
        """Loads the best weights from the disk; None if there are none."""
        return load(self.path(self.step)).tensors.get("weights", {}) if self.step else None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"
