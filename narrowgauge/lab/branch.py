"""Branch: a run that continues from a checkpoint of another run under other numerics.

Recipe, precision and formats of the optimizer states may differ from its parent, the other run.

    copied exactly        weights (16-bit weights with their masters), position in the data,
                          generators, step number (and with it the learning rate), loss scale
    converted by value    moments and masters that the branch stores in other formats
                          (`optim.transfer`)
    copied if compatible  amax histories, learned steps, sampler statistics: if the layer's recipe
                          uses the same, else they start fresh

A branch with the parent's settings is bit-identical to the parent's continuation. It starts by
writing a checkpoint of its own and then resumes from it like any run. So it can be killed and
resumed on any number of ranks, and does not need the parent any more. Loading the parent's
checkpoint directly was rejected: resuming, sharded states and kills would need a second code path.

While the branch is being created, both models are in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge import manifest
from narrowgauge.diagnose.runs import read_run
from narrowgauge.errors import CheckpointError, ConfigError, OutOfMemoryError
from narrowgauge.lab import run_guard
from narrowgauge.lab.reopen import PLAIN, reopened, silent_log
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.linear import QLinear
from narrowgauge.optim import transfer
from narrowgauge.recipes import AUTO
from narrowgauge.storage import reading
from narrowgauge.structure import is_weight
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.checkpoint_ref import CheckpointRef
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.tasks import TrainTask, task_class
from narrowgauge.train.trainer import Trainer

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

FRESH_OPTIMIZER = "The optimizer starts anew: what the branch goes on from are weights alone, or no step was taken."


def begin(config: TrainConfig, folder: RunFolder, task: TrainTask) -> list[str]:
    """Writes the first checkpoint of the branch `config` into its folder.

    Returns sentences on the state that was copied.

    Runs in one process that is no rank. The folder holds no run until this function returns, so a
    kill loses nothing.

    Raises like `reopened`, and ConfigError for settings that a branch cannot have or if no step is
    left.
    """
    start = CheckpointRef.of(config.parent)
    parent_config = checkpoint_ref.settings_of(start.run)
    checkpoint_ref.refuse(parent_config, config)
    with reopened(start, parent_config, task) as parent:
        if parent.step >= config.steps:
            raise ConfigError(
                f"from = {config.parent!r}: it is at step {parent.step}, and the branch ends at training.steps = {config.steps}. Raise "
                "--training.steps, or "
                f"start from an earlier checkpoint. {checkpoint_ref.existing(start.run)}",
                code="branch.past-end",
            )
        # Recipe "auto" measures on the device
        chooses = AUTO in (config.recipe, *config.layers_recipe.values())
        if chooses and _same_recipes(parent_config, config):
            folder.write_run(
                {"auto": parent.setup.auto}
            )  # the same recipes: keep the parent's choices
        # On the CPU: creating a branch needs no GPU unless "auto" has to measure.
        plain = replace(config, device=config.device if chooses else "cpu", **PLAIN)
        branch = Trainer(plain, folder, task, silent_log(), plugins=[run_guard.plugin])
        said = take_over(parent, branch)
        if chooses:
            folder.write_run({"auto": branch.setup.auto})
        asked = (
            checkpoint_ref.settings_of(folder.path) if folder.config.is_file() else config
            # On several ranks, micro_batches in `config` covers all ranks, unlike the user's value
            # in the file.
        )
        branch.mark_branch(
            {
                "run": os.path.relpath(start.run, folder.path), "from": config.parent, "step": parent.step,
                "started_at": _started_at(parent.folder), "fingerprint": _fingerprint(parent),
                "changes": {key: [str(each) for each in pair] for key, pair in checkpoint_ref.changes(parent_config, asked).items()},
                "carried": said,
            }
        )  # fmt: skip
        tensors, facts = branch.collected()
        facts["agreement"] = _agreement(parent, branch)
        branch.checkpoints.write(folder.checkpoints, branch.step, tensors, facts, config.keep)
    return said


def begin_apart(config: TrainConfig, path: Path) -> list[str]:
    """`begin` in a separate process, for rank 0 of several.

    Models built in the rank's own process would start collectives, while the other ranks wait for
    the checkpoint.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_begin, config, path).result()
        except BrokenProcessPool:
            raise OutOfMemoryError(
                f"from = {config.parent!r}: the process that begins the branch was killed, as by a system that runs out of memory: parent "
                "and branch are both in it. Begin it in one process, and go on with --resume on several ranks.",
                code="memory.branch",
            ) from None


def _begin(config: TrainConfig, path: Path) -> list[str]:
    return begin(config, RunFolder(path), task_class(config.task).prepare(config))


def take_over(parent: Trainer, branch: Trainer) -> list[str]:
    """Copies the parent's state into a new trainer, in the trainer's own formats.

    Returns a sentence for each part.
    """
    # The guard's next check depends on the step, so the position comes first.
    parent.start.restore_into(branch.training)
    if _same_recipes(parent.config, branch.config):
        # Apply the recipe of higher precision that a guard gave the parent
        branch.plugins.before_load(parent.plugins.state())
        branch.plugins.on_load(parent.plugins.state())
    branch.switches.apply_until(parent.step, branch.model)
    _take_weights(parent, branch)
    said = _take_layers(parent.model, branch.model)
    pairs = list(_pairs(parent, branch))
    # Converts by rounding to nearest: in a single conversion, the errors of stochastic rounding do
    # not average out.
    found = transfer.transfer(parent.optimizer, branch.optimizer, pairs)
    if not found.states:
        said.append(FRESH_OPTIMIZER)
    elif found.unchanged == found.states:
        said.append("Weights and optimizer: bit for bit.")
    else:
        said.append(f"Other formats, by decoded values: {'; '.join(found.words())}.")
    branch.passes.take_norm_of(parent.passes)
    if branch.passes.scaler and not parent.passes.scaler:
        said.append("The loss scale starts anew: the parent has none.")
    branch.checkpoints.take_best_of(parent.checkpoints)
    # Last: building and copying the branch drew random numbers.
    parent.start.restore_generators()
    return said


def _same_recipes(one: TrainConfig, other: TrainConfig) -> bool:
    return all(
        getattr(one, key) == getattr(other, key)
        for key in ("recipe", "layers_recipe", "embedding_codes", "switch")
    )


def _take_weights(parent: Trainer, branch: Trainer) -> None:
    """Copies all tensors of the unconverted model, in the branch's dtypes.

    `transfer.transfer` writes the trained weights again, with their master weights.
    """
    saved, own = parent.model.state_dict(), branch.model.state_dict()
    names, here = ({name for name in each if is_weight(name)} for each in (saved, own))
    if parent.config.freeze and names != here:
        raise ConfigError(
            f"model.freeze = {parent.config.freeze!r}: frozen weights are kept as codes of the parent's recipe, which the branch does "
            "not have. "
            "Keep the recipe of the frozen layers, with --recipes.",
            code="branch.frozen-codes",
        )
    different = names ^ here or {name for name in names if saved[name].shape != own[name].shape}
    if different:
        raise CheckpointError(
            f"from = {branch.config.parent!r}: a checkpoint of another model: {min(different)!r} is not in both, or has another shape. "
            "Branch with the model of the parent.",
            code="branch.other-model",
        )
    with torch.no_grad():
        for name in here:
            own[name].copy_(saved[name])


def _pairs(parent: Trainer, branch: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (parent's parameter, branch's parameter) for all parameters that both train.

    Of learned steps, only the copied ones are included.
    """
    before = dict(parent.model.named_parameters())
    kept = {id(each) for group in parent.optimizer.param_groups for each in group["params"]}
    mine = {id(each) for group in branch.optimizer.param_groups for each in group["params"]}
    for name, parameter in branch.model.named_parameters():
        old = before.get(name)
        if old is None or id(old) not in kept or id(parameter) not in mine:
            continue
        if is_weight(name) or torch.equal(old, parameter.to(old.device)):
            yield old, parameter


def _take_layers(parent: nn.Module, branch: nn.Module) -> list[str]:
    """Copies amax histories, learned steps and sampler statistics. Returns sentences.

    Only layers with compatible recipes get them.
    """
    before = {
        name: each
        for name, each in parent.named_modules()
        if isinstance(each, QLinear | QEmbedding)
    }
    counts: dict[str, list[int]] = {}
    for name, layer in branch.named_modules():
        if not isinstance(layer, QLinear | QEmbedding):
            continue
        old = before.get(name)
        for what, module in _states(layer):
            count = counts.setdefault(what, [0, 0])
            source = dict(_states(old)).get(what) if old is not None else None
            if source is not None and _same(what, old, layer):
                module.load_state_dict(source.state_dict())
                count[0] += 1
            else:
                count[1] += 1
    return [
        f"{what}: {kept} layers carried over, {new} new." for what, (kept, new) in counts.items()
    ]


def _states(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    for what, module in (
        ("Amax histories", layer.scaling),
        ("Learned steps", layer.steps),
        ("Samplers", layer.sampling),
    ):
        if module is not None:
            yield what, module


def _same(what: str, old: Any, new: Any) -> bool:
    """True if a state of the layer's old recipe is valid under its new recipe.

    An amax history holds magnitudes, so it is valid in every format. Learned steps belong to one
    grid.
    """
    if isinstance(old, QEmbedding):
        return bool(old.format == new.format)
    if what == "Amax histories":
        windows = [
            {role: window for role, (window, _) in each.recipe.delayed_scaling().items()}
            for each in (old, new)
        ]
        return windows[0] == windows[1]
    if what == "Learned steps":
        return bool(
            old.steps.settings == new.steps.settings and old.recipe.output == new.recipe.output
        )
    return bool(old.sampling.settings == new.sampling.settings)


def _agreement(parent: Trainer, branch: Trainer) -> dict[str, Any]:
    """State that all ranks share: random counters and scales of gradient communication.

    The scales are dropped if the branch sends gradients in another format.
    """
    known: dict[str, Any] = {"seed": parent.config.seed, "step": parent.step}
    if parent.checkpoints.resumed_from:
        path = Path(parent.checkpoints.resumed_from)
        listing = manifest.read(path)
        if not listing.save:
            facts = reading.strict_json(manifest.read_file(path, manifest.FACTS, listing))
        else:
            # Lazy: importing torch's checkpoint planners is slow
            from narrowgauge.distributed import storage

            facts = storage.read(path, only="facts")["facts"]
        known = facts.get("agreement", known)
    kept = known.get("gradients", {}) if parent.config.gradients == branch.config.gradients else {}
    return {**known, "gradients": kept}


def _fingerprint(parent: Trainer) -> str:
    """SHA-256 of the manifest of the parent's checkpoint, or of its best weights.

    The manifest holds the hashes of all files.
    """
    best = parent.folder.best / f"step-{parent.step:08}"
    return manifest.fingerprint(
        Path(parent.checkpoints.resumed_from) if parent.checkpoints.resumed_from else best
    )


def _started_at(folder: RunFolder) -> str:
    return str(read_run(folder.run).get("started_at", "")) if folder.run.is_file() else ""
