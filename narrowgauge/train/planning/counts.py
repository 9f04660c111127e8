"""Memory forecasts of configurations, each traced once, with a cache in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.diagnose.guard_settings import COPIES
from narrowgauge.errors import ConfigError
from narrowgauge.ops import rng
from narrowgauge.plan.forecast import Forecast, forecast
from narrowgauge.plan.moments import MemoryMoment
from narrowgauge.plan.sharding import divided, micro_batches_in_flight
from narrowgauge.plan.tally import as_rows, from_rows
from narrowgauge.plan.text import gib
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.config.settings import FUSED_SAVES, NO_RECIPE, TrainConfig
from narrowgauge.train.planning import cache
from narrowgauge.train.planning.depth import layers_of
from narrowgauge.train.planning.steps import MOST_MICRO_BATCHES, Source

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device
    from narrowgauge.plan.forecast import Forecast
    from narrowgauge.train.config.parallel_syntax import Layout
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.tasks import Shape


def silent(number: int) -> None:
    """Ignores progress."""


@dataclass
class Counts:
    """Forecasts for one device.

    device  device whose kernels and allocator are simulated
    full    trace every layer instead of extrapolating from a few
    tell    called with the number of each trace before it starts; a trace takes seconds
    known   forecasts so far
    """

    device: Device
    full: bool = False
    tell: Callable[[int], None] = silent
    known: dict[str, Forecast] = field(default_factory=dict)
    _processes: dict[str, Forecast] = field(default_factory=dict)

    def of(self, config: TrainConfig, shape: Shape | None = None) -> Forecast:
        """Largest memory of any rank of the run.

        shape  shape of a micro-batch; default: the largest that the settings allow
        """
        # A guarded run alternates between its recipe and BF16 probes, so it needs the larger peak.
        if config.guard:
            return guarded(
                self.of(replace(config, guard=""), shape), self.of(probe_in_bf16(config), shape)
            )
        refuse(config)
        sizes = parallel_syntax.named(config.parallel)
        source = Source.of(config, sizes.data, shape)
        question = [cache.question_of(config), asdict(source.shape), asdict(self.device), self.full]
        key = repr(question)
        if key not in self.known:
            found = _from_json(cache.load(question))
            if found is None:
                self.tell(len(self.known) + 1)
                with generators_kept(), _of_the_model(config):
                    found = self._counted(source, sizes)
                cache.store(question, _as_json(found))
            self.known[key] = found
        return self.known[key]

    def whole(self, source: Source) -> Forecast:
        """Forecast of one process that does all the work of a step; not cached."""
        layers, _ = layers_of(source.config, source.model_class)
        with generators_kept():
            return forecast(source.builder, self.device, layers, full=True)

    def _counted(self, source: Source, sizes: Layout) -> Forecast:
        layers, differing = layers_of(source.config, source.model_class)
        if 0 < layers < sizes.pp:
            raise ConfigError(
                f"parallel = {source.config.parallel!r}: {layers} layers are fewer than {sizes.pp} stages. Take a smaller pp.",
                code="pipeline.blocks",
            )
        # Ceiling: plan for the stage with the most blocks.
        of_stage = -(-layers // sizes.pp)
        if sizes.pp > 1 and layers:
            found = forecast(
                lambda depth: source.builder(depth or of_stage),
                self.device,
                of_stage,
                differing,
                self.full,
            )
        else:
            found = self._of_one(source, layers, differing)
        micro_batches = source.config.micro_batches
        in_flight = micro_batches_in_flight(source.config.schedule, sizes.pp, micro_batches)
        found = divided(
            found,
            of_stage,
            copies=sizes.dp,
            fsdp=sizes.fsdp,
            tp=sizes.tp,
            stages=sizes.pp,
            in_flight=in_flight if sizes.pp > 1 else 1,
            steady=micro_batches > in_flight,
        )
        return replace(found, notes=(*found.notes, *notes_of(source)))

    def _of_one(self, source: Source, layers: int, differing: str) -> Forecast:
        """Forecast of one process with a rank's micro-batch.

        Any number of dp and fsdp ranks follows from this one trace, so it is cached without them.
        """
        question = cache.question_of(source.config)
        # The shape has the rows already. Without batch_size, configurations that differ only in the
        # number of ranks share an entry.
        question.pop("batch_size")
        question["parallel"] = replace(parallel_syntax.named(source.config.parallel), dp=1, fsdp=1)
        key = repr([question, source.shape])
        if key not in self._processes:
            self._processes[key] = forecast(
                source.builder, self.device, layers, differing, self.full
            )
        return self._processes[key]


@contextmanager
def _of_the_model(config: TrainConfig) -> Iterator[None]:
    """Converts a transformers model's RuntimeError in a step to a chained ConfigError."""
    try:
        yield
    # A RuntimeError as well, but not caused by the model's configuration.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not config.model:
            raise
        words = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"plan: model = {config.model!r}: a step of it fails: {words}. Check the sizes in its config.json, and that narrowgauge train "
            "takes a step with these settings.",
            code="plan.step-fails",
        ) from error


def notes_of(source: Source) -> Iterator[str]:
    """Notes about simplifications that affect this forecast."""
    config = source.config
    if source.shape.note:
        yield source.shape.note
    if config.task == "text" and not config.model and not config.tokenizer:
        yield f"the vocabulary is taken as {config.vocab_size:,} words; a tokenizer trained on few texts has fewer"
    if config.micro_batches > MOST_MICRO_BATCHES:
        yield f"{MOST_MICRO_BATCHES} of {config.micro_batches} micro-batches are counted, the others are like the second"
    if config.compile:
        yield "compiled code decides itself what it keeps; counted is the step without torch.compile, which rarely keeps less"
    if config.cuda_graph:
        yield "CUDA graphs keep what a step works with in a pool of their own, which is counted as if it were given back"
    if config.weights == "codes":
        yield "gathered weights are counted in the type of the weights, also where their codes are gathered, which take a byte a number"
    if config.switch:
        yield "counted are the recipes of the first step; a switch widens some later"


def refuse(config: TrainConfig) -> None:
    """Raises ConfigError for settings that cannot be traced."""
    if "auto" in (config.recipe, *config.layers_recipe.values()):
        raise ConfigError(
            "recipe = 'auto': is chosen by measurements on the device of the run, which a plan does not have. Plan a recipe by its "
            "name, as --recipe fp8-current.",
            code="plan.auto-recipe",
        )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores Python's and torch's random generators, which building a model seeds."""
    with rng.preserved(), rng.python_preserved():
        yield


def _as_json(found: Forecast) -> dict[str, Any]:
    # JSON has no tuple keys: parts become [part, kind, size] lists.
    moments = [
        {**asdict(each), "parts": [[part, kind, size] for (part, kind), size in each.parts.items()]}
        for each in found.moments
    ]
    plain = {each.name: getattr(found, each.name) for each in fields(found)}
    return {**plain, "moments": moments, "work": as_rows(found.work)}


def _from_json(entry: Any) -> Forecast | None:
    """Forecast from a cache entry; None for an entry of another form."""
    try:
        moments = [
            MemoryMoment(
                **{**each, "parts": {(part, kind): size for part, kind, size in each["parts"]}}
            )
            for each in entry["moments"]
        ]
        work = from_rows(entry["work"])
        return Forecast(
            **{**entry, "moments": tuple(moments), "notes": tuple(entry["notes"]), "work": work}
        )
    except (TypeError, KeyError, ValueError):
        return None


def probe_in_bf16(config: TrainConfig) -> TrainConfig:
    """Configuration of a guard's probe: Linears in the precision's dtype, plain embeddings."""
    save = config.save if config.save in FUSED_SAVES else ""
    return replace(
        config,
        recipe=NO_RECIPE,
        layers_recipe={},
        embedding_codes="",
        attention="",
        switch="",
        save=save,
        guard="",
    )


def guarded(narrow: Forecast, wide: Forecast) -> Forecast:
    """Larger forecast of recipe (`narrow`) and BF16 probe (`wide`), with a note on the guard.

    A BF16 step can need more memory than the recipe's: it saves 16-bit tensors for backward where
    the recipe saves codes. The copies of the state lie on the host or on disk.
    """
    copied = COPIES * max(
        sum(each.parts.get((part, ""), 0) for part in ("weights", "states"))
        for each in narrow.moments
    )
    note = (
        f"a step of a check in BF16 needs {gib(wide.allocated)}, one of the recipe {gib(narrow.allocated)}; in a check up to "
        f"{gib(copied)} of state wait in the host's memory, or on the disk"
    )
    found = wide if wide.allocated > narrow.allocated else narrow
    return replace(found, notes=(*found.notes, note))
