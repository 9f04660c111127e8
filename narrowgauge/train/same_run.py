"""Checks that a checkpoint belongs to a run: step, numeric settings, data, past switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from narrowgauge import manifest
from narrowgauge.diagnose import forms
from narrowgauge.errors import CheckpointError, ConfigError, DataError
from narrowgauge.train.checkpoint import state
from narrowgauge.train.config.settings import TrainConfig, former_key, key_of

if TYPE_CHECKING:
    from narrowgauge.train.checkpoint.store import Checkpoint


def refuse(
    found: Checkpoint,
    config: TrainConfig,
    settings: Mapping[str, Any],
    identity: Mapping[str, str],
    past: list[str],
) -> None:
    """Raises an error if a checkpoint cannot belong to the run of `config`.

    settings  the run's settings that change its arithmetic
    identity  name -> fingerprint of the run's data and tokenizer
    past      recipe switches that precede the checkpoint's step in this run

    Raises ConfigError for steps and switches, CheckpointError for the facts and numeric settings,
    DataError for the data.
    """
    steps, facts = config.steps, found.facts
    if found.step > steps:
        raise ConfigError(
            f"training.steps = {steps}: the run is at step {found.step} already, in {found.path}. "
            f"Resume with --training.steps {found.step} or more.",
            code="resume.steps",
        )
    if problem := forms.refuse(facts, state.FACTS):
        raise CheckpointError(
            f"{found.path / manifest.FACTS}: {problem}. Restore the checkpoint, or remove it to go on from an older one.",
            code="checkpoint.state",
        )
    # Older checkpoints lack these keys and were written with these values. Any other missing key
    # counts as equal.
    before = {"keep_float32": "none", "loss": "chunks", "embedding_codes": "", "attention": ""}
    for key, own in settings.items():
        if facts.get(key, before.get(key, own)) != own:
            named = {former_key(each): key_of(each) for each in fields(TrainConfig)}
            raise CheckpointError(
                f"{found.path}: was written with {named.get(key, key)} = {facts.get(key, before.get(key))!r}, this run has {own!r}. "
                "Resume with the settings that wrote it, or start anew in another --output.",
                code="resume.other-settings",
            )
    for key, own in identity.items():
        if facts[key] != own:
            raise DataError(
                f"{found.path}: trained with another {key.replace('content_hash', 'data content')} than "
                f"{config.data!r} has now. Restore the data, or start anew in another --output.",
                code="resume.other-data",
            )
    # A switch given as a share of the run moves with --training.steps. It must not move across the
    # checkpoint.
    stored = facts.get("switched", [])
    if past != stored:
        raise ConfigError(
            f"training.steps = {steps}: at step {found.step} of {found.path} the switches {stored or 'none'} had happened, but in a run "
            f"of {steps} steps {past or 'none'} would have. Resume with the steps it had, or start anew in another --output.",
            code="resume.switches",
        )
