"""The low-precision Linear: `linear`, a function, and QLinear, an nn.Linear with a recipe.

Autocast sets the dtype of the output, as for nn.Linear. Operands are quantized from the tensors as
they are passed. linear_function.py has the GEMMs.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once

from narrowgauge.addresses import in_memory, is_compiling, type_of, wrapper
from narrowgauge.errors import ConfigError
from narrowgauge.nn import step_end
from narrowgauge.nn.cast_sources import NUMBERS, InputCasts
from narrowgauge.nn.converted_state import ADDED, SUBMODULES, StateField
from narrowgauge.nn.keep_policy import WeightCodes, keep_policy, resolved
from narrowgauge.nn.linear_context import (
    NO_PROGRESS,
    ONE_RANK,
    CastSources,
    LinearContext,
    RankOptions,
    RecipeProgress,
)
from narrowgauge.nn.linear_function import LinearFunction, plan_of
from narrowgauge.nn.linear_state import LinearState
from narrowgauge.nn.observer import Observation, Observer, needs_x
from narrowgauge.nn.plan import PRODUCTS, LinearPlan
from narrowgauge.ops.registry import device_facts, imported
from narrowgauge.recipe import Recipe

if TYPE_CHECKING:
    from narrowgauge.nn.amax_history import AmaxHistory
    from narrowgauge.nn.learned_step import LearnedSteps
    from narrowgauge.nn.leverage_score import RowSampling
    from narrowgauge.nn.operands import Casts
    from narrowgauge.nn.sharded import Locals
    from narrowgauge.nn.weight_cache import WeightCache

__all__ = ["Observer", "QLinear", "WeightCodes", "linear"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Function.apply searches every argument for transforms and for tensors that a finished transform
# has left behind: 2 us. Eager mode calls the C++ `apply` directly. `_check` has found that no
# transform is active, and `_UNWRAPPED` handles the tensors.
_APPLY: Any = super(torch.autograd.Function, LinearFunction).apply
_UNWRAPPED: Any = torch._C._functorch.unwrap_if_dead
# Imported on the first error or transform, so that importing a Linear stays cheap.
_REFUSALS, _TRANSFORMS = "narrowgauge.nn.linear_refusals", "narrowgauge.nn.transforms"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] -> [..., N] by `recipe`, differentiable in all three.

    The result has autocast's dtype, or x's if autocast is off. Raises
    ShapeError for a wrong last axis, and ConfigError for a recipe with state
    (delayed scaling, learned steps, sampling), which requires a QLinear.
    """
    if not isinstance(recipe, Recipe) or recipe.has_state:
        imported(_REFUSALS, "refuse_recipe")(recipe)
    _check(x, weight, bias, recipe)
    plan = plan_of(recipe, x.device, _hidden_by(x, weight))
    keep = keep_policy(
        save=recipe.save,
        casts_once=plan.x.casts_once,
        device_type=device_facts(x.device.type, x.device.index).type,
        weight_codes="auto",
        weight="recast" if is_compiling() else "none",
    )
    context = LinearContext(plan=plan, out_dtype=_out_dtype(x), keep=keep)
    y: Tensor = LinearFunction.apply(_rows(x), weight, bias, context, None, None, None)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class QLinear(nn.Linear):
    """nn.Linear whose GEMMs follow a recipe.

    `layer.recipe` may be set at any time, to a Recipe, its name, or None. Setting it drops the
    state of the old recipe. Learned steps with the same settings stay the same parameters and are
    reset. A state dict without any state of the recipe leaves the layer's state unchanged, with a
    warning. A partial one has missing keys: an error with strict=True.

    state          LinearState: everything that a recipe adds to the layer, but for submodules
    observer       receives every operand in eager mode, and results if it has `multiplied`; see
                   `Observer` and `observer.ProductObserver`
    is_suspended   True: compute as nn.Linear
    weight_codes   "auto", "recast" or "step", see `keep_policy`
    reason         why `convert` chose another recipe than requested, for `describe`; '' if it did
                   not
    decision       decision of recipe "auto" (narrowgauge.conversion.auto.Decision), else None
    scaling        ModuleDict role -> AmaxHistory under delayed scaling, else None
    steps          LearnedSteps, or None
    sampling       RowSampling, or None
    frozen         (nn.frozen.FrozenWeight) codes that replace the weight, or None
    original       (of the class) the class that `restore` gives back; see `disguised`
    is_transposed  (of the class) the weight is stored [in_features, out_features]
    """

    original: ClassVar[type[nn.Module]] = nn.Linear
    is_transposed: ClassVar[bool] = False
    state: LinearState
    is_expert = False  # True for a matrix of experts in one parameter (nn.grouped_linear)
    observer = StateField["Observer | None"]()
    is_suspended = StateField[bool]()
    weight_codes = StateField["WeightCodes"]()
    reason = StateField[str]()
    decision = StateField["object | None"]()
    __prepare_scriptable__ = imported(_TRANSFORMS, "refuse_script")  # called by torch.jit.script
    qconfig = property(
        None, imported(_TRANSFORMS, "refuse_qconfig")
    )  # set by torch.ao.quantization

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, recipe: Recipe | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self._become(recipe)

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: Recipe | str | None) -> QLinear:
        """Turn an nn.Linear into a QLinear in place.

        The module object, its parameters, hooks and users stay the same.
        """
        module.__class__ = cls
        assert isinstance(module, cls)
        module._become(recipe)
        return module

    def _become(self, recipe: Recipe | str | None) -> None:
        self.state = LinearState()
        self.recipe = recipe
        step_end.follow_layer(self)

    # Properties, since a missing submodule would go through nn.Module.__getattr__ at every call.
    @property
    def scaling(self) -> nn.ModuleDict | None:
        return self._modules.get("scaling")  # type: ignore[return-value]

    @property
    def steps(self) -> LearnedSteps | None:
        return self._modules.get("steps")  # type: ignore[return-value]

    @property
    def sampling(self) -> RowSampling | None:
        return self._modules.get("sampling")  # type: ignore[return-value]

    @property
    def frozen(self) -> Any:
        return self._modules.get("frozen")

    @property
    def matrix(self) -> Tensor:
        """The weight [out_features, in_features], as the products read it: itself or a view."""
        return self._turned(self.weight) if self.is_transposed else self.weight

    def _turned(self, weight: Tensor) -> Tensor:
        """The view [out_features, in_features] of a weight that is stored transposed."""
        if type(weight) is nn.Parameter or is_compiling():
            return weight.t()
        if type(weight).__name__ == "DTensor":
            raise imported(_REFUSALS, "transposed_shards")(weight)
        # A watched weight (`bypassed_weights`) would take its view for another matrix.
        with torch._C.DisableTorchFunctionSubclass():
            return weight.t()

    def as_before(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer without a recipe. weight: as `matrix`, decoded if it is stored as codes."""
        if self.state.recipe is None or is_compiling():
            return nn.functional.linear(x, weight, self.bias)
        from narrowgauge.nn.suspended_linear import suspended_linear

        return suspended_linear(x, weight, self.bias)

    @property
    def parameter(self) -> Tensor | None:
        """The parameter that holds the weight; None if torch's parametrization computes it."""
        return self._parameters.get("weight")

    def held_parameters(self) -> Iterator[Tensor]:
        """The parameters by which an optimizer knows the layer."""
        return (each for each in self._parameters.values() if each is not None)

    def names(self, name: str) -> tuple[str, ...]:
        """Names by which patterns find the layer. name: its own."""
        return (name,)

    def weight_in_memory(self) -> Tensor | None:
        """The weight if it is stored; None if torch's parametrization computes it."""
        return self._parameters.get("weight")

    @property
    def recipe(self) -> Recipe | None:
        return self.state.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        if isinstance(recipe, str):
            from narrowgauge import recipes  # not needed for a Recipe

            recipe = recipes.get(recipe)
        if recipe is not None and not isinstance(recipe, Recipe):
            imported(_REFUSALS, "refuse_recipe")(recipe, "QLinear.recipe")
        self.refuse(recipe)
        self.compute_as(recipe)
        self.state.reason, self.state.decision = "", None
        with torch.inference_mode(False):  # tensors made in inference mode cannot be trained later
            self.renew_state()

    def refuse(self, recipe: Recipe | None) -> None:
        """Raise ConfigError if the layer cannot have this recipe."""
        if self.frozen is not None and not self.frozen.serves(recipe):
            raise ConfigError(
                f"QLinear.recipe: the weight was frozen as codes of recipe {self.recipe and self.recipe.name!r}, which no other recipe "
                "reads. Call narrowgauge.memory.thaw(model) first, which gives back what they decode to.",
                code="freeze.other-recipe",
            )

    def compute_as(self, recipe: Recipe | None) -> None:
        """Set the recipe without changing state.

        Amax histories, learned steps and sampling stay as the recipe before left them.
        """
        state = self.state
        state.recipe, state.plans, state.step_watch = recipe, {}, None
        self.empty_cache()

    def renew_state(self) -> None:
        """Create the state of a new recipe: amax histories, learned steps, sampling.

        Learned steps with the settings of the old recipe stay the same parameters. New ones require
        a gradient if the weight does, so a frozen layer stays frozen as a whole.
        """
        device, recipe = self.weight.device, self.recipe
        delayed, steps, samples = {}, {}, {}
        if recipe is not None:
            delayed, steps, samples = (
                recipe.delayed_scaling(),
                recipe.learned_steps(),
                recipe.samplers(),
            )
        self.put_submodule("scaling", None)
        self.put_submodule("sampling", None)
        if delayed:
            from narrowgauge.nn.amax_history import AmaxHistory

            histories = {role: AmaxHistory(each, device) for role, (each, _) in delayed.items()}
            self.put_submodule("scaling", nn.ModuleDict(histories))
        # An optimizer may hold the parameters: keep them if the settings agree.
        if self.steps is not None and self.steps.settings == steps:
            self.steps.reset_parameters()
        else:
            self.put_submodule("steps", None)
        if steps and self.steps is None:
            from narrowgauge.nn.learned_step import LearnedSteps

            made = LearnedSteps(steps, device).requires_grad_(self.weight.requires_grad)
            self.put_submodule("steps", made)
        if samples:
            from narrowgauge.nn.leverage_score import RowSampling

            self.put_submodule("sampling", RowSampling(samples, device))

    def put_submodule(self, name: str, module: nn.Module | None) -> None:
        """Add, replace or remove one of SUBMODULES.

        nn.Module's own assignment refuses None, and `add_module` the name of a property.
        """
        self._modules.pop(name, None)
        if module is not None:
            self._modules[name] = module

    def empty_cache(self, keep: bool = False) -> None:
        """Drop the quantized weight.

        keep  True: cache casts from now on until the next call, as `advance` does. Casts left by
              the optimizer's step stay: they belong to the weight as it is now, unless it is
              written
        """
        state = self.state
        before = state.cache
        if keep or before is not None:
            from narrowgauge.nn.weight_cache import WeightCache  # not needed for inference

            before = before or WeightCache()
            # Start the copy of the comparison to the host. A later step's end
            # reads it without waiting.
            for changed in (
                before.changed,
                None if state.precast is None else state.precast.taken_changed(),
            ):
                if changed is not None:
                    from narrowgauge.ops.fingerprint import Readback

                    state.write_checks += (Readback(changed),)
            state.cache = before.renewed(self.recasts)
        if not keep and state.precast is not None:
            state.precast.forget()
        if (source := self.code_source) is not None:
            source.invalidate()

    @property
    def code_source(self) -> Any:
        """The holder of the weight's codes while the parameter has no memory; None if it has."""
        # Not by the property `frozen`: every call of the layer and every step come here.
        frozen: Any = self._modules.get("frozen")
        return self.state.gathered if frozen is None else frozen

    @contextmanager
    def separate_cache(self) -> Iterator[None]:
        """Inside the block, cache weight casts apart: the cache from before returns at the end."""
        before = self.state.cache
        if before is None or not before.is_given:
            from narrowgauge.nn.weight_cache import WeightCache

            self.state.cache = WeightCache(recasts=self.recasts)
        try:
            yield
        finally:
            self.state.cache = before

    def stop_caching(self) -> None:
        """Stop caching weight casts, as before the first `empty_cache(keep=True)`."""
        self.state.cache = None

    @property
    def recasts(self) -> bool:
        """True if backward recasts the weight instead of reading cached codes."""
        parameter = self.parameter
        device = (self.weight if parameter is None else parameter).device
        return (
            resolved(self.state.weight_codes, device_facts(device.type, device.index).type)
            == "recast"
        )

    def cached_casts(self) -> list[Casts]:
        return [] if self.state.cache is None else [self.state.cache.casts]

    def end_step(self) -> None:
        """End a step, for every recipe: drop casts of the weight and of inputs."""
        self.empty_cache(keep=True)
        if self.state.shared_inputs is not None:
            self.state.shared_inputs.clear()
        self.state.step_watch = None

    def use_casts(self, casts: Casts) -> None:
        """Use these casts until the next `empty_cache`, even if the weight is written."""
        from narrowgauge.nn.weight_cache import WeightCache

        self.state.cache = WeightCache(casts, is_given=True)

    def forward(self, input: Tensor) -> Tensor:
        x, compiling = input, is_compiling()
        state, frozen = self.state, self.frozen
        recipe = state.recipe
        if not compiling:
            state.was_called = True
            if frozen is not None:
                frozen.check(self)  # may drop the codes
                frozen = self.frozen
        source = state.gathered if frozen is None else frozen
        if source is not None:
            if not compiling:
                if frozen is None:
                    # FSDP has filled the parameter for this pass. The codes
                    # replace it, so free its memory.
                    source.free_storage(self.weight)
            elif state.is_suspended or not (source.serves(recipe) and source.joins_graphs):
                return self._forward_eagerly(x)
        if recipe is None or state.is_suspended:
            return self.as_before(
                x, self.matrix if source is None else source.original(self.weight)
            )
        if not isinstance(x, Tensor):
            return imported(_TRANSFORMS, "leaf")(self, x)
        parameters = self._parameters  # lacks a weight under torch's parametrization
        weight: Tensor = self.weight if (own := parameters.get("weight")) is None else own
        if frozen is not None:
            weight = frozen.placeholder(weight)
        if self.is_transposed:
            weight = self._turned(weight)
        bias: Tensor | None = parameters.get("bias") if "bias" in parameters else self.bias
        _check(x, weight, bias, recipe)
        apply: Any = LinearFunction.apply
        if not compiling:
            apply, x, weight = _APPLY, _UNWRAPPED(x), _UNWRAPPED(weight)
            bias = None if bias is None else _UNWRAPPED(bias)
        owner, local = x, None
        # By name: importing DTensor takes a second.
        if type(weight).__name__ == "DTensor" or type(x).__name__ == "DTensor":
            from narrowgauge.nn.sharded import Locals

            local = Locals(x, weight, bias, None if compiling else self._any_state())
            x, weight, bias, owner = local.x, local.weight, local.bias, local.owner
        # A pass without gradients reads no cached cast: evaluation may run on averaged or merged
        # weights. A random cast is read in training: the first pass of reentrant checkpointing has
        # no gradients, and its repetition would find the cast of an earlier micro-batch.
        reads = torch.is_grad_enabled() or (self.training and _draws_weight(recipe))
        context, inputs = self.context(x, state.cache if reads else None), None
        if not compiling:
            if (
                state.shared_inputs is not None
                and (inputs := state.shared_inputs.of(x, self, owner)) is not None
            ):
                context.sources.by_role["x"] = [inputs]
            if self._modules and (history := self.amax_history("x")) is not None:
                context.sources.x_history_key = self._history_key(history, inputs)
            if context.keep.grads and self.training and self._remembers:
                if state.step_ended:
                    state.step_ended = False
                self._expect_advance(weight)
        try:
            y: Tensor = apply(
                _rows(x), weight, bias, context, *self._states(x, weight, context, local)
            )
            if x.ndim != 2:
                y = y.reshape(*x.shape[:-1], weight.shape[0])
            return y if local is None else local.wrap(y)
        except (RuntimeError, TypeError) as error:
            raise imported(_TRANSFORMS, "explained")(error, x, weight, bias)  # noqa: B904
        finally:
            context.sources.by_role.pop(
                "x", None
            )  # backward holds the context, which must not hold casts
            if inputs is not None:
                inputs.was_read(self)

    def _history_key(self, history: AmaxHistory, inputs: InputCasts | None) -> Hashable:
        """Return `CastSources.x_history_key` and note that the amax history recorded this input."""
        lineage, groups = (
            history.lineage(),
            () if (peers := self.state.peers) is None else tuple(map(id, peers.groups)),
        )
        if self.training:
            history.saw(next(NUMBERS) if inputs is None else inputs.number)
        return None if inputs is None or lineage is None else (lineage, groups)

    @_disable_dynamo
    def _forward_eagerly(self, x: Tensor) -> Tensor:
        """Compute between two compiled graphs: a graph would read a weight without data."""
        return self.forward(x)

    def context(self, x: Tensor, cache: WeightCache | None = None) -> LinearContext:
        """Return the options of one call.

        x      an input, for its dtype and device
        cache  cache of weight casts, in eager mode only
        """
        state = self.state
        assert state.recipe is not None
        if is_compiling():
            return self._compiled_context(x)
        source, out_dtype = self.code_source, _out_dtype(x)
        cache = cache if source is None else source
        weight = self.weight_in_memory()
        # A float32 layer on a CPU dequantizes to float32 once, instead of converting bfloat16
        # values in every GEMM: six conversions less per call (decisions/layers.md).
        wide = (
            out_dtype == x.dtype == torch.float32
            and weight is not None
            and weight.dtype == torch.float32
        )
        plan = self.plan(x.device, _hidden_by(x, weight), wide and type_of(x.device) == "cpu")
        observer, peers = state.observer, state.peers
        keep = keep_policy(
            save=state.recipe.save,
            casts_once=plan.x.casts_once,
            device_type=device_facts(x.device.type, x.device.index).type,
            weight_codes=state.weight_codes,
            weight="none" if cache is None else "recast" if cache.recasts else "step",
            observer_needs_x=observer is not None and needs_x(observer),
            grads=torch.is_grad_enabled(),
            x=x,
        )
        return LinearContext(
            plan=plan,
            out_dtype=out_dtype,
            records=self.training,
            keep=keep,
            sources=self._sources(cache, source is None),
            progress=self._progress(cache is not None) if self._modules else NO_PROGRESS,
            ranks=ONE_RANK
            if peers is None
            else RankOptions(stream=peers.stream(x.device), sums_by_row=True),
            observation=None if observer is None else Observation(observer),
        )

    def _compiled_context(self, x: Tensor) -> LinearContext:
        """Compiled code has no caches and no observer, and draws from torch's generator."""
        state, source = self.state, self.code_source
        assert state.recipe is not None
        plan = plan_of(state.recipe, x.device)
        caches = (
            source is not None
            or resolved(state.weight_codes, self.weight.device.type, compiled=True) == "step"
        )
        keep = keep_policy(
            save=state.recipe.save,
            casts_once=plan.x.casts_once,
            device_type=device_facts(x.device.type, x.device.index).type,
            weight_codes=state.weight_codes,
            weight="step" if caches else "recast",
        )
        sources = CastSources()
        if source is not None:
            sources = CastSources(by_role={"w": [source]}, weight_cache=source)
        return LinearContext(
            plan=plan,
            out_dtype=_out_dtype(x),
            records=self.training,
            keep=keep,
            sources=sources,
            progress=self._progress(False),
            ranks=RankOptions(sums_by_row=state.peers is not None),
        )

    def _sources(self, weight_cache: Any, has_weight: bool) -> CastSources:
        """The caches of one call in eager code.

        weight_cache  WeightCache or holder of the weight's codes, or None
        has_weight    False if the parameter has no memory
        """
        state = self.state
        by_role: dict[str, Sequence[Any]] = {}
        if weight_cache is not None:
            by_role["w"] = [weight_cache]
            if state.precast is not None and has_weight:
                from narrowgauge.nn.weight_cache import PrecastSource

                by_role["w"] = [PrecastSource(state.precast, weight_cache), weight_cache]
        if state.shared_inputs is not None:
            by_role["gy"] = [state.shared_inputs.gradients]
        return CastSources(by_role=by_role, weight_cache=weight_cache)

    def _progress(self, is_cached: bool) -> RecipeProgress:
        """Progress of learned steps and samplers.

        is_cached  a cache holds casts of the weight, which are valid for one version of the steps
        """
        steps, sampling = self.steps, self.sampling
        if steps is None and sampling is None:
            return NO_PROGRESS
        return RecipeProgress(
            is_cold=steps is not None and steps.is_cold,
            sampled=() if sampling is None else sampling.active,
            steps_version=steps.version() if is_cached and steps is not None else (),
        )

    def _expect_advance(self, weight: Tensor) -> None:
        """Warn once of a training loop without `advance`: the weight changes and no step ends."""
        if weight.is_inference():
            return
        if self.state.step_watch is None:
            from narrowgauge.nn.step_watch import StepWatch  # for recipes with state

            self.state.step_watch = StepWatch()
        self.state.step_watch.look(self, weight)

    def amax_state(self, role: str) -> Tensor | None:
        """Amax state of role "x", "w" or "gy" (`ops.quantize.amax_state`); None without one."""
        history = self.amax_history(role)
        return None if history is None else history._buffers["live"]

    @property
    def _remembers(self) -> bool:
        """True if the recipe added state to the layer."""
        modules = self._modules  # nn.Module.__getattr__ costs a microsecond
        return bool(modules) and not ADDED.keys().isdisjoint(modules)

    def _any_state(self) -> Tensor | None:
        """A buffer that the recipe added to the layer, or None."""
        return next(self.buffers(), None) if self._remembers else None

    def amax_history(self, role: str) -> AmaxHistory | None:
        """AmaxHistory of a role ("x", "w" or "gy"); None without one."""
        scaling = self._modules.get("scaling")
        return None if scaling is None else scaling._modules.get(role)  # type: ignore[return-value]

    def _states(
        self, x: Tensor, weight: Tensor, context: LinearContext, local: Locals | None
    ) -> tuple[Tensor | None, ...]:
        """Tensor arguments of LinearFunction besides x, weight and bias.

        Three amax states, or two learned steps and the sampler's readings; None for missing ones.
        """
        modules = self._modules
        if not modules:
            return None, None, None
        if (scaling := modules.get("scaling")) is not None:
            found: list[Tensor | None] = []
            for role in PRODUCTS:
                history: Any = scaling._modules.get(role)
                found.append(None if history is None else history._buffers["live"])
            return tuple(found)
        steps, sampling = self.steps, self.sampling
        variance = None if sampling is None or not self.training else sampling.live
        if steps is None:
            return None, None, variance
        from narrowgauge.nn.straight_through import steps_in_use

        is_cold = context.progress.is_cold
        x_step, w_step = steps_in_use(
            steps, _rows(x), weight, context.plan, writes=self.training, is_cold=is_cold
        )
        if local is not None:
            x_step, w_step = local.step(x_step, "x"), local.step(w_step, "w")
        return x_step, w_step, variance

    def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        """As nn.Module; without arguments, only the layer itself.

        torch's ColwiseParallel and similar styles call it so to find the parameters to shard. The
        state that a recipe added is equal on all ranks and is not sharded.
        """
        return super().named_modules(*given, **named) if given or named else iter([("", self)])

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module, but ignore learned steps, which ColwiseParallel would replace by DTensors.

        It registers every entry of named_parameters again after sharding.
        """
        if not name.startswith("steps."):
            super().register_parameter(name, param)

    def train(self, mode: bool = True) -> QLinear:
        """As nn.Module, and drop the quantized weight on `eval` and on a change of mode.

        Averaged weights are swapped in around an evaluation.
        """
        if mode != self.training or not mode:
            self.empty_cache()
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> QLinear:
        """Move or convert the layer, as by model.to(...), and drop the casts of its weight."""
        if self.frozen is None:
            super()._apply(fn, recurse)
        else:
            self.frozen.move(self, lambda: super(QLinear, self)._apply(fn, recurse))
        self.empty_cache()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """As nn.Module; a weight frozen as codes is dequantized on read, beside its codes."""
        if self.frozen is not None:
            self.frozen.check(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        from narrowgauge.nn.state_loading import load

        load(self, super()._load_from_state_dict, state_dict, prefix, *rest)

    def plan(self, device: torch.device, hidden_by: str = "", wide: bool = False) -> LinearPlan:
        """The plan of the layer's recipe on a device, computed once; see `LinearPlan.of`."""
        plans, recipe = self.state.plans, self.state.recipe
        if (plan := plans.get((device, hidden_by, wide))) is None:
            assert recipe is not None
            plan = plans[device, hidden_by, wide] = plan_of(recipe, device, hidden_by, wide)
        return plan

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={None if self.recipe is None else self.recipe.name}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.frozen is not None:
            self.frozen.hold(self)  # the copied Parameter has no elements yet
        step_end.follow_layer(self)

    def __getstate__(self) -> dict[str, Any]:
        """State for copy and pickle: fields without a copied lifetime are left out (`converted_state`)."""
        frozen = {} if self.frozen is None else self.frozen.copied(self)
        # nn.Module's leaves out the compiled call, which would compute with the original's weights.
        plain: dict[str, Any] = super().__getstate__()
        return plain | {"state": self.state.copied()} | frozen

    def restore(self) -> None:
        """Turn it into a module of its original class again, in place.

        A class of other code, as torch's parametrization makes one, stays, without a recipe.
        """
        self.recipe = None
        if "original" not in vars(type(self)):
            return
        step_end.forget(self)
        for name in SUBMODULES:
            self.put_submodule(name, None)
        del self.__dict__["state"]
        self.__class__ = self.original  # type: ignore[assignment]


class _Given(threading.local):
    """The layer that this thread calls with other matrices, and these."""

    layer: QLinear | None = None
    views: tuple[Tensor, Tensor | None] | None = None


_given = _Given()


def called_with(layer: QLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Call a layer that reads its weight and bias by `views_of`, in eager mode.

    For matrices of a parameter that another module holds. Threads may share the layer.
    """
    before = _given.layer, _given.views
    _given.layer, _given.views = layer, (weight, bias)
    try:
        found: Tensor = layer(x)
        return found
    finally:
        _given.layer, _given.views = before


def views_of(layer: QLinear) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) inside `called_with`, else None."""
    return _given.views if not is_compiling() and _given.layer is layer else None


def _hidden_by(x: Tensor, weight: Tensor | None) -> str:
    """`addresses.wrapper` of the operands, as the kernels receive them."""
    if not wrapper(x, weight):
        return ""
    # `operands.find` copies negated views and zero tensors, so these hide nothing from a kernel.
    return wrapper(in_memory(x), None if weight is None else in_memory(weight))


def _out_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64:  # autocast skips both, as for nn.Linear
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> None:
    """Raise an error for operands and transforms that the GEMMs do not support.

    The module with the messages is imported only if this short test fails.
    """
    # The dispatch stack holds modes such as make_fx's.
    fits = is_compiling() or not (
        torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
        or torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack()
    )  # fmt: skip
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        is_dense = (
            isinstance(tensor, Tensor)
            and tensor.dtype in _FLOATS
            and tensor.layout == torch.strided
        )
        fits = fits and is_dense and not tensor.is_nested and tensor.device == x.device
    fits = fits and weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[1]
    if fits and (bias is None or (bias.ndim == 1 and bias.shape[0] == weight.shape[0])):
        return
    imported(_REFUSALS, "refuse")(x, weight, bias, _FLOATS, recipe)


def _draws_weight(recipe: Recipe) -> bool:
    """True if the forward cast of the weight needs random numbers."""
    cast = recipe.output.rhs
    return cast is not None and cast.draws != ""


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]. T is computed, since -1 is ambiguous if K is 0."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
