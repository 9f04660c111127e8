"""`narrowgauge export`: the model of a run, or of a Hugging Face folder, for `narrowgauge.export.save`.

    RUN          RUN/final, or the newest checkpoint of a run without one
    RUN@STEP     the checkpoint of a step, with the amax histories that the run has recorded
    RUN@best     the weights of the best evaluation
    FOLDER       a folder of transformers, converted to a recipe that the caller names

A run's recipes come from its own config.toml, with all switches up to the weights' step, and are
compared with the table of layers in run.json. Reading final/ needs neither data nor cache.

A calibration reads text by the model's own tokenizer, or the batches of the run's first steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge import data, export
from narrowgauge.conversion import convert
from narrowgauge.conversion.description import describe
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import ConfigError
from narrowgauge.train.checkpoint_ref import BEST, CheckpointRef, settings_of
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.evaluation.saved import NEWEST, SavedRun, converted_model, newest_facts
from narrowgauge.train.pretrained import (
    ModelClass,
    own_configuration,
    pretrained,
    refuse_quantized,
)
from narrowgauge.train.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor, nn

CPU = torch.device("cpu")
CAUSAL = ("text", "causal-lm")  # tasks whose batches are ids of one text
OWN = "own"  # calibration by the run's own data
ROWS, POSITIONS = 32, 512  # of a calibration, at most
# The amax of fewer tokens is too small for a text that follows, whose elements saturate in the reader.
LEAST_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an export; see `narrowgauge.export.save`.

    recipe     of a folder that is no run
    calibrate  file or folder of text, or OWN: training data of the run; None: no calibration
    """

    format: str
    output: Path
    recipe: str = ""
    requantize: bool = False
    calibrate: str | None = None
    fused: bool = True
    overwrite: bool = False
    load: bool = True


def exported(source: str, options: Options) -> export.ExportReport:
    """Exports what `source` names, and returns the report. Writes nothing into the source."""
    form = export.format_of(options.format)
    if options.calibrate is not None:
        export.refuse_calibration(form)
        if not options.calibrate.strip():
            raise ConfigError(
                f"--calibrate {options.calibrate!r}: names no text. Name a file or a folder with text, or {OWN} for the run's own data.",
                code="export.calibration",
            )
    ref = CheckpointRef.of(source)
    folder = RunFolder(ref.run)
    if Path(options.output).resolve() == ref.run.resolve():
        raise ConfigError(
            f"output = '{options.output}': is the folder that is exported. Name a new folder.",
            code="export.output",
        )
    if os.path.lexists(folder.config):
        if options.recipe:
            raise ConfigError(
                f"--recipe {options.recipe}: {ref.run} is a run with recipes of its own. Leave --recipe out, or name {folder.final} to "
                "convert its weights to another recipe.",
                code="export.recipe-of-run",
            )
        _refuse_adapters(folder)
        with RunFolder.reading(ref.run):
            model, tokenizer, facts = _of_run(ref, form.inputs)
            is_own = options.calibrate == OWN
            ids = _own_ids(ref.run, model) if is_own else _ids(options.calibrate, model, tokenizer)
            return _save(model, tokenizer, facts, options, ids)
    if options.calibrate == OWN:
        raise ConfigError(
            f"--calibrate {OWN}: is of a run, and '{source}' is a folder of a model. Name a file with text.",
            code="export.calibration",
        )
    model, facts = _of_folder(source, options.recipe, needs_recipe=form.cast is not None)
    ids = _ids(options.calibrate, model, Path(source))
    return _save(model, Path(source), facts, options, ids)


def _save(
    model: nn.Module, tokenizer: Any, facts: Mapping[str, Any], options: Options, ids: Tensor | None
) -> export.ExportReport:
    if options.calibrate is not None:
        words = "the run's own data" if options.calibrate == OWN else f"'{options.calibrate}'"
        facts = {**facts, "calibration": words}
    return export.save(
        model.eval(),
        options.output,
        format=options.format,
        tokenizer=tokenizer,
        requantize=options.requantize,
        fused=options.fused,
        overwrite=options.overwrite,
        load=options.load,
        facts=facts,
        calibration=ids,
    )


# --- token ids of a calibration ------------------------------------------------------------------


def _ids(source: str | None, model: Any, tokenizer: Any) -> Tensor | None:
    """[rows, positions] int64 of the beginning of a text; None without one.

    tokenizer  an object, or the folder of one
    """
    if source is None:
        return None
    if isinstance(tokenizer, Path):
        tokenizer = data.load(tokenizer)
    found: list[int] = []
    for document in data.documents(source):
        found += tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(found) >= ROWS * POSITIONS:
            break
    return _rows(found, model, f"'{source}'")


def _own_ids(run: Path, model: Any) -> Tensor:
    """[rows, positions] int64 of what a run read in its first steps, without padding."""
    saved = SavedRun.open(run, CPU)
    if saved.config.task not in CAUSAL:
        raise ConfigError(
            f"--calibrate {OWN}: the task of {run} is {saved.config.task!r}, whose batches are not token ids alone. Name a file with text.",
            code="export.calibration",
        )
    feed, found = saved.task.feed(model), list[int]()
    for step in range(saved.config.steps):
        for batch in feed.draw(step).batches:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            found += (ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]).flatten().tolist()  # fmt: skip
        if len(found) >= ROWS * POSITIONS:
            break
    return _rows(found, model, f"the data of {run}")


def _rows(ids: list[int], model: Any, source: str) -> Tensor:
    """ids end to end in rows of equal length; the last, shorter row is dropped."""
    longest = getattr(model.config, "max_position_embeddings", None) or POSITIONS
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"--calibrate: {source} has {len(ids)} tokens for this model, and {LEAST_TOKENS} are the least from which a scale of x is "
            "taken. Name a file with more text, like that of the use.",
            code="export.calibration",
        )
    positions = min(POSITIONS, longest, len(ids))
    rows = min(ROWS, len(ids) // positions)
    return torch.tensor(ids[: rows * positions]).reshape(rows, positions)


# --- a run ---------------------------------------------------------------------------------------


def _refuse_adapters(folder: RunFolder) -> None:
    """Raises ConfigError for a run that trained adapters: weights and final/ are the adapters alone."""
    config = settings_of(folder.path)
    if not config.lora:
        return
    recipe = config.base or config.recipe
    first = (
        ""
        if folder.merged.is_dir()
        else f"Merge them first: narrowgauge train --resume --output {folder.path} --merge. "
    )
    then = "Then name" if first else "Name"
    raise ConfigError(
        f"'{folder.path}': trained adapters, which no format holds. {first}{then} {folder.merged} with --recipe {recipe}.",
        code="export.adapter",
    )


def _of_run(ref: CheckpointRef, needs_history: bool) -> tuple[Any, Any, dict[str, Any]]:
    """(model, tokenizer or its folder, facts) of a run. needs_history: final/ has none."""
    folder = RunFolder(ref.run)
    if ref.step is None and folder.final.is_dir() and not needs_history:
        model = _of_final(folder)
        return model, folder.final, _facts(folder, None)
    saved = SavedRun.open(ref.run, CPU)
    (path,) = saved.paths(NEWEST if ref.step is None else str(ref.step))
    model, step, why = saved.model(path)
    if why:
        raise ConfigError(
            f"{ref}: {why}. Name a checkpoint, as {ref.run}@{step}.", code="export.weights-alone"
        )
    return model, saved.task.tokenizer, _facts(folder, step)


def _of_final(folder: RunFolder) -> Any:
    """The converted model with the weights of final/. Raises ConfigError if it is another model."""
    config = replace(settings_of(folder.path), output=str(folder.path), device="cpu", resume=False)
    known = read_run(folder.run) if folder.run.exists() else {}
    facts = newest_facts(folder, config)
    model = converted_model(
        folder, config, lambda: _loaded(folder.final), CPU, 0, config.steps, facts
    )
    _refuse_other_model(model, known, folder)
    return model


def _refuse_other_model(model: Any, known: Mapping[str, Any], folder: RunFolder) -> None:
    """Raises ConfigError if layers, shapes or recipes are not those of run.json."""
    rows = {row["name"]: row for row in known.get("describe", ())}
    here = {row.name: row for row in describe(model)}
    if not rows:
        return
    for name in sorted(rows.keys() ^ here.keys()):
        raise ConfigError(
            f"{folder.final}: {name!r} is {'not ' if name in rows else ''}in it and {'' if name in rows else 'not '}in run.json: it holds "
            f"another model than the run trained. Restore it, or name a checkpoint, as {folder.path}@{BEST}.",
            code="export.other-model",
        )
    for name, row in here.items():
        ours, theirs = (
            (row.shape, _narrow(row.recipe)),
            (rows[name]["shape"], _narrow(rows[name]["recipe"])),
        )
        if ours != theirs:
            raise ConfigError(
                f"{folder.final}: {name!r} is {ours[0]} in {ours[1]}, but {theirs[0]} in {theirs[1]} in run.json: it holds another model "
                f"than the run trained. Restore it, or name a checkpoint, as {folder.path}@{BEST}.",
                code="export.other-model",
            )


def _narrow(recipe: str) -> str:
    # A CPU without bfloat16 instructions gives ordinary Linears the recipe bf16.
    return "16 bits" if recipe in ("none", "bf16") else recipe


def _facts(folder: RunFolder, step: int | None) -> dict[str, Any]:
    """Facts for the model card; absent where the folder does not have them."""
    config = settings_of(folder.path)
    events = read_metrics(folder.metrics)
    last = [each for each in events if step is None or each["step"] <= step]
    scores = [each for each in last if each["event"] == "eval"]
    guard = [each for each in last if each["event"] == "guard"]
    layers = ", ".join(f"{pattern}: {name}" for pattern, name in config.layers_recipe.items())
    facts = {
        "recipe": config.recipe + (f" ({layers})" if layers else ""),
        "precision": config.precision,
        "task": config.task,
        "data": config.data,
        "source": config.model,
        "steps": step or max((each["step"] for each in last if each["event"] == "step"), default=0),
        "loss": f"{scores[-1]['loss']:.4f} at step {scores[-1]['step']}, on the validation data"
        if scores
        else "",
        "verdict": guard[-1].get("sentence", "") if guard else "",
    }
    return {key: value for key, value in facts.items() if value}


# --- a folder of transformers --------------------------------------------------------------------


def _of_folder(source: str, recipe: str, needs_recipe: bool) -> tuple[Any, dict[str, Any]]:
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(
            f"'{source}': no such folder. Name the folder of a run, perhaps with a step, as runs/first@100, or of a model.",
            code="export.source",
        )
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"'{source}': holds an adapter and no model. Name merged/ of its run, which narrowgauge train --resume --merge writes.",
            code="export.adapter",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"'{source}': holds neither a run (config.toml) nor a model (config.json). Name another folder.",
            code="export.source",
        )
    if needs_recipe and not recipe:
        raise ConfigError(
            f"'{source}': is a model without recipes, and the format holds the codes of one. Pass --recipe, with which it was trained.",
            code="export.no-recipe",
        )
    model = _loaded(folder)
    if recipe:
        convert(model, recipe)
    return model, {"source": source} | ({"recipe": recipe} if recipe else {})


def _loaded(folder: Path) -> Any:
    """The model of a folder in float32, by the class that its config.json names."""
    import transformers

    found = TrainConfig(model=str(folder))
    sizes = own_configuration(found, ModelClass(transformers.AutoModel, "model"))
    refuse_quantized(str(folder), getattr(sizes, "quantization_config", None))
    names = getattr(sizes, "architectures", None) or ["none"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise ConfigError(
            f"'{folder}': its config.json names no class of transformers (architectures: {names[0]}). Name another folder.",
            code="export.class",
        )
    return pretrained(found, ModelClass(kind, names[0]))
