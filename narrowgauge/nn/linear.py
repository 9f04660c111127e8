"""The low-precision Linear: `linear`, a function, and QLinear, an nn.Linear with a recipe.

Autocast sets the dtype of the output, as for nn.Linear. Operands are quantized from the tensors as
they are passed. linear_function.py has the GEMMs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once

from narrowgauge.addresses import is_compiling, type_of, wrapper
from narrowgauge.errors import ConfigError
from narrowgauge.nn import step_end
from narrowgauge.nn.caches import NUMBERS, InputCasts, SharedInputs
from narrowgauge.nn.linear_function import LinearFunction, plan_of
from narrowgauge.nn.operands import Casts
from narrowgauge.nn.plan import PRODUCTS, LinearContext, LinearPlan, Observer
from narrowgauge.nn.weight_codes import WeightCodes, chosen
from narrowgauge.ops.registry import device_facts, imported
from narrowgauge.recipe import Recipe

if TYPE_CHECKING:
    from narrowgauge.nn.amax_history import AmaxHistory
    from narrowgauge.nn.learned_step import LearnedSteps
    from narrowgauge.nn.leverage_score import RowSampling
    from narrowgauge.nn.sharded import Locals
    from narrowgauge.nn.step_watch import StepWatch
    from narrowgauge.nn.weight_cache import WeightCache
    from narrowgauge.ops.fingerprint import Readback
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight

__all__ = ["Observer", "QLinear", "WeightCodes", "linear"]

_ADDED = ("scaling", "steps", "sampling")  # submodules that recipes add
_NOT_COPIED = (
    "_cache",
    "precast",
    "observer",
    "peers",
    "gathered",
    "watch",
    "_step_watch",
)  # None in a copy
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
    plan = plan_of(recipe, x.device, wrapper(x, weight))
    is_cpu = device_facts(x.device.type, x.device.index).type == "cpu"
    context = LinearContext(plan, _out_dtype(x), keeps_x=is_cpu and not plan.x.transposes)
    y: Tensor = LinearFunction.apply(_rows(x), weight, bias, context, None, None, None)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class QLinear(nn.Linear):
    """nn.Linear whose GEMMs follow a recipe.

    `layer.recipe` may be set at any time, to a Recipe, its name, or None. Setting it drops the
    state of the old recipe. Learned steps with the same settings stay the same parameters and are
    reset. A state dict without any state of the recipe leaves the layer's state unchanged, with a
    warning. A partial one raises an error.

    observer       receives every operand in eager mode, and results if it has `multiplied`; see
                   `Observer` and `observer.ProductObserver`
    is_suspended   True: compute as nn.Linear
    weight_codes   "auto", "recast" or "step", see `weight_codes`
    reason         why `convert` chose another recipe than requested, for `describe`; '' if it did
                   not
    decision       decision of recipe "auto" (narrowgauge.conversion.auto.Decision), else None
    scaling        ModuleDict role -> AmaxHistory under delayed scaling, else None
    steps          LearnedSteps, or None
    sampling       RowSampling, or None
    precast        casts of the weight that the optimizer's step leaves, or None
    shared_inputs  cache of x's casts, shared by all layers of a model
    peers          (distributed.state.Peers) ranks that hold the layer; None without
                   `distribute`
    gathered       (distributed.weights.GatheredWeight) codes from other ranks; None
    frozen         (nn.frozen.FrozenWeight) codes that replace the weight; None
    step_ended     an optimizer of torch ended the step, and no other step has begun
    suspects       comparisons of reused casts with the weight, read at a later step's end
    """

    scaling: nn.ModuleDict | None
    steps: LearnedSteps | None
    sampling: RowSampling | None
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
        self.observer: Observer | None = None
        self.is_suspended = False
        self.reason = ""
        self.decision: object | None = None
        # conversion._restore and diagnose.blame.undisturbed list these
        # attributes: add new ones there.
        self.precast: PrecastWeight | None = None
        self.shared_inputs: SharedInputs | None = None
        # Any, since importing their types would be a cycle.
        self.peers: Any = None
        self.gathered: Any = None
        self.frozen: Any = None
        self.warned_of_ranks = self.warned_of_eval = self.warned_of_float16 = False
        self.float16_steps = 0
        self.weight_codes: WeightCodes = "auto"
        self.reads_last = False  # the layer was the last reader of its previous input (nn.caches)
        # nn.reached: called in this step; weight multiplied without a call; steps without a call.
        self.called = self.bypassed = False
        self.missed, self.watch = 0, None
        self.step_ended = False
        self._cache: WeightCache | None = None
        self._step_watch: StepWatch | None = None  # detects training without `advance`
        self.suspects: tuple[Readback, ...] = ()
        self._recipe: Recipe | None = None
        self._plans: dict[tuple[torch.device, str, bool], LinearPlan] = {}
        self.scaling = self.steps = self.sampling = None
        self.recipe = recipe
        step_end.follow_layer(self)

    @property
    def recipe(self) -> Recipe | None:
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        if isinstance(recipe, str):
            from narrowgauge import recipes  # not needed for a Recipe

            recipe = recipes.get(recipe)
        if recipe is not None and not isinstance(recipe, Recipe):
            imported(_REFUSALS, "refuse_recipe")(recipe, "QLinear.recipe")
        self.refuse(recipe)
        self.compute_as(recipe)
        self.reason, self.decision = "", None
        with torch.inference_mode(False):  # tensors made in inference mode cannot be trained later
            self.renew_state()

    def refuse(self, recipe: Recipe | None) -> None:
        """Raise ConfigError if the layer cannot have this recipe."""
        if self.frozen is not None and not self.frozen.serves(recipe):
            raise ConfigError(
                f"QLinear.recipe: the weight was frozen as codes of recipe {self._recipe and self._recipe.name!r}, which no other recipe "
                "reads. Call narrowgauge.memory.thaw(model) first, which gives back what they decode to.",
                code="freeze.other-recipe",
            )

    def compute_as(self, recipe: Recipe | None) -> None:
        """Set the recipe without changing state.

        Amax histories, learned steps and sampling stay as the recipe before left them.
        """
        self._recipe, self._plans, self._step_watch = recipe, {}, None
        self.empty_cache()

    def renew_state(self) -> None:
        """Create the state of a new recipe: amax histories, learned steps, sampling.

        Learned steps with the settings of the old recipe stay the same parameters. New ones require
        a gradient if the weight does, so a frozen layer stays frozen as a whole.
        """
        device, recipe = self.weight.device, self._recipe
        windows, steps, samples = {}, {}, {}
        if recipe is not None:
            windows, steps, samples = (
                recipe.delayed_scaling(),
                recipe.learned_steps(),
                recipe.samplers(),
            )
        self.scaling = self.sampling = None
        if windows:
            from narrowgauge.nn.amax_history import AmaxHistory

            self.scaling = nn.ModuleDict(
                {role: AmaxHistory(each, device) for role, (each, _) in windows.items()}
            )
        # An optimizer may hold the parameters: keep them if the settings agree.
        if self.steps is not None and self.steps.settings == steps:
            self.steps.reset_parameters()
        else:
            self.steps = None
        if steps and self.steps is None:
            from narrowgauge.nn.learned_step import LearnedSteps

            self.steps = LearnedSteps(steps, device).requires_grad_(self.weight.requires_grad)
        if samples:
            from narrowgauge.nn.leverage_score import RowSampling

            self.sampling = RowSampling(samples, device)

    def empty_cache(self, keep: bool = False) -> None:
        """Drop the quantized weight.

        keep  True: cache casts from now on until the next call, as `advance` does. Casts left by
              the optimizer's step stay: they belong to the weight as it is now, unless it is
              written
        """
        before = self._cache
        if keep or before is not None:
            from narrowgauge.nn.weight_cache import WeightCache  # not needed for inference

            before = before or WeightCache()
            # Start the copy of the comparison to the host. A later step's end
            # reads it without waiting.
            for changed in (
                before.changed,
                None if self.precast is None else self.precast.taken_changed(),
            ):
                if changed is not None:
                    from narrowgauge.ops.fingerprint import Readback

                    self.suspects += (Readback(changed),)
            # nn.Module.__setattr__ costs 2 us.
            self.__dict__["_cache"] = before.renewed(self.recasts)
        if not keep and self.precast is not None:
            self.precast.forget()
        if self.carried is not None:
            self.carried.invalidate()

    @property
    def carried(self) -> Any:
        """The holder of the weight's codes while the parameter has no memory; None if it has."""
        return self.gathered if self.frozen is None else self.frozen

    @contextmanager
    def keeping_apart(self) -> Iterator[None]:
        """Inside the block, cache weight casts apart: the cache from before returns at the end."""
        before = self._cache
        if before is None or not before.is_given:
            from narrowgauge.nn.weight_cache import WeightCache

            self._cache = WeightCache(recasts=self.recasts)
        try:
            yield
        finally:
            self._cache = before

    def stop_keeping(self) -> None:
        """Stop caching weight casts, as before the first `empty_cache(keep=True)`."""
        self._cache = None

    @property
    def recasts(self) -> bool:
        """True if backward recasts the weight instead of reading cached codes."""
        weight = self._parameters.get("weight")
        device = (self.weight if weight is None else weight).device
        return chosen(self.weight_codes, device_facts(device.type, device.index).type) == "recast"

    def _keeps_x(self, plan: LinearPlan, device: torch.device) -> bool:
        """True on a CPU if x.T needs its own cast and weight_codes is not "recast".

        See `LinearContext`.
        """
        if plan.x.transposes or plan.recipe.save != "quantized" or self.weight_codes == "recast":
            return False
        return device_facts(device.type, device.index).type == "cpu"

    def kept_casts(self) -> list[Casts]:
        return [] if self._cache is None else [self._cache.casts]

    def end_step(self) -> None:
        """End a step, for every recipe: drop casts of the weight and of inputs."""
        self.empty_cache(keep=True)
        if self.shared_inputs is not None:
            self.shared_inputs.clear()
        self.__dict__["_step_watch"] = None

    def take_casts(self, casts: Casts) -> None:
        """Use these casts until the next `empty_cache`, even if the weight is written."""
        from narrowgauge.nn.weight_cache import WeightCache

        self._cache = WeightCache(casts, is_given=True)

    def forward(self, input: Tensor) -> Tensor:
        x, compiling = input, is_compiling()
        if not compiling:
            self.__dict__["called"] = True  # nn.Module.__setattr__ costs a microsecond
            if self.frozen is not None:
                self.frozen.check(self)  # may drop the codes, so read `carried` afterwards
        carried = self.carried
        if carried is not None:
            if not compiling:
                if self.frozen is None:
                    # FSDP has filled the parameter for this pass. The codes
                    # replace it, so free its memory.
                    carried.free_storage(self.weight)
            elif self.is_suspended or not (carried.serves(self._recipe) and carried.joins_graphs):
                return self._forward_eagerly(x)
        if self._recipe is None or self.is_suspended:
            original = self.weight if carried is None else carried.original(self.weight)
            if self._recipe is None or compiling:
                return nn.functional.linear(x, original, self.bias)
            from narrowgauge.nn.suspended_linear import suspended_linear

            return suspended_linear(x, original, self.bias)
        if not isinstance(x, Tensor):
            return imported(_TRANSFORMS, "leaf")(self, x)
        parameters = self._parameters  # lacks a weight under torch's parametrization
        weight: Tensor = self.weight if (own := parameters.get("weight")) is None else own
        if self.frozen is not None:
            weight = self.frozen.placeholder(weight)
        bias: Tensor | None = parameters.get("bias") if "bias" in parameters else self.bias
        _check(x, weight, bias, self._recipe)
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
        # A pass without gradients reads no cached cast: evaluation may run
        # on averaged or merged weights.
        context, inputs = self.context(x, self._cache if torch.is_grad_enabled() else None), None
        if not compiling:
            if (
                self.shared_inputs is not None
                and (inputs := self.shared_inputs.of(x, self, owner)) is not None
            ):
                context.sources["x"] = [inputs]
            if (window := self.window("x")) is not None:
                context.x_window = self._window_key(window, inputs)
            if (
                context.cache is not None
                and context.cache.recasts
                and self._recipe.save == "quantized"
            ):
                from narrowgauge.nn.kept_inputs import stays  # for recipes that save codes of x

                context.keeps_x = stays(x)
            if context.grads and self.training and self._remembers:
                if self.step_ended:
                    self.step_ended = False
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
            context.sources.pop("x", None)  # backward holds the context, which must not hold casts
            if inputs is not None:
                inputs.was_read(self)

    def _window_key(self, window: AmaxHistory, inputs: InputCasts | None) -> Hashable:
        """Return `LinearContext.x_window` and note that the amax history recorded this input."""
        lineage, groups = (
            window.lineage(),
            () if self.peers is None else tuple(map(id, self.peers.groups)),
        )
        if self.training:
            window.saw(next(NUMBERS) if inputs is None else inputs.number)
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
        assert self._recipe is not None
        steps, sampling, out_dtype = self.steps, self.sampling, _out_dtype(x)
        is_cold, sampled = (
            steps is not None and steps.is_cold,
            () if sampling is None else sampling.active,
        )
        if is_compiling():
            plan = plan_of(self._recipe, x.device)
            by_rows = self.peers is not None
            found = LinearContext(
                plan, out_dtype, self.training, is_cold=is_cold, sampled=sampled, by_rows=by_rows
            )
            found.keeps_x = self._keeps_x(plan, x.device)
            device = self.weight.device.type
            found.keeps_w = (
                self.carried is None and chosen(self.weight_codes, device, compiled=True) == "step"
            )
            if (carried := self.carried) is not None:
                found.sources, found.cache = {"w": [carried]}, carried
            return found
        cache = cache if self.carried is None else self.carried
        sources: dict[str, list[Any]] = {}
        if cache is not None:
            sources["w"] = [cache]
            if self.precast is not None and self.carried is None:
                from narrowgauge.nn.weight_cache import PrecastSource

                sources["w"].insert(0, PrecastSource(self.precast, cache))
        if self.shared_inputs is not None:
            sources["gy"] = [self.shared_inputs.gradients]
        weight = self._parameters.get("weight")
        # A float32 layer on a CPU dequantizes to float32 once, instead of converting bfloat16
        # values in every GEMM: six conversions less per call (docs/log.md).
        wide = (
            out_dtype == x.dtype == torch.float32
            and weight is not None
            and weight.dtype == torch.float32
        )
        shows_results = hasattr(self.observer, "multiplied")
        watches = shows_results and getattr(self.observer, "keeps_inputs", True)
        plan = self.plan(x.device, wrapper(x, weight), wide and type_of(x.device) == "cpu")
        return LinearContext(
            plan, out_dtype, self.training, torch.is_grad_enabled(), sources, cache, self.observer, is_cold, sampled,
            () if steps is None or cache is None else steps.version(),
            None if self.peers is None else self.peers.stream(x.device), self.peers is not None, None,
            watches or self._keeps_x(plan, x.device), False, watches, shows_results=shows_results,
        )  # fmt: skip

    def _expect_advance(self, weight: Tensor) -> None:
        """Warn once of a training loop without `advance`: the weight changes and no step ends."""
        if weight.is_inference():
            return
        if self._step_watch is None:
            from narrowgauge.nn.step_watch import StepWatch  # for recipes with state

            self._step_watch = StepWatch()
        self._step_watch.look(self, weight)

    def amax_state(self, role: str) -> Tensor | None:
        """Amax state of role "x", "w" or "gy" (`ops.quantize.amax_state`); None without one."""
        window = self.window(role)
        return None if window is None else window._buffers["live"]

    @property
    def _remembers(self) -> bool:
        """True if the recipe added state to the layer."""
        modules = self._modules  # nn.Module.__getattr__ costs a microsecond
        return bool(modules) and any(modules.get(name) is not None for name in _ADDED)

    def _any_state(self) -> Tensor | None:
        """A buffer that the recipe added to the layer, or None."""
        return next(self.buffers(), None) if self._remembers else None

    def window(self, role: str) -> AmaxHistory | None:
        """AmaxHistory of a role ("x", "w" or "gy"); None without one."""
        scaling = self._modules.get("scaling")
        return None if scaling is None else scaling._modules.get(role)  # type: ignore[return-value]

    def _states(
        self, x: Tensor, weight: Tensor, context: LinearContext, local: Locals | None
    ) -> tuple[Tensor | None, ...]:
        """Tensor arguments of LinearFunction besides x, weight and bias.

        Three amax states, or two learned steps and the sampler's readings; None for missing ones.
        """
        if (scaling := self._modules.get("scaling")) is not None:
            windows: list[Any] = [scaling._modules.get(role) for role in PRODUCTS]
            return tuple(
                [None if window is None else window._buffers["live"] for window in windows]
            )
        variance = None if self.sampling is None or not self.training else self.sampling.live
        if self.steps is None:
            return None, None, variance
        from narrowgauge.nn.straight_through import steps_in_use

        found = steps_in_use(
            self.steps, _rows(x), weight, context.plan.recipe, writes=self.training
        )
        if local is not None:
            found = local.step(found[0], "x"), local.step(found[1], "w")
        return *found, variance

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
        from narrowgauge.nn.linear_state import load

        load(self, super()._load_from_state_dict, state_dict, prefix, *rest)

    def plan(self, device: torch.device, hidden_by: str = "", wide: bool = False) -> LinearPlan:
        """The plan of the layer's recipe on a device, computed once; see `LinearPlan.of`."""
        if (plan := self._plans.get((device, hidden_by, wide))) is None:
            assert self._recipe is not None
            plan = self._plans[device, hidden_by, wide] = plan_of(
                self._recipe, device, hidden_by, wide
            )
        return plan

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, recipe={None if self._recipe is None else self._recipe.name}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.frozen is not None:
            self.frozen.hold(self)  # the copied Parameter has no elements yet
        step_end.follow_layer(self)

    def __getstate__(self) -> dict[str, Any]:
        """State for copy and pickle: without cached casts, the optimizer's casts and observer."""
        frozen = {} if self.frozen is None else self.frozen.copied(self)
        return (
            self.__dict__
            | dict.fromkeys(_NOT_COPIED)
            | {"_plans": {}, "step_ended": False, "suspects": ()}
            | frozen
        )


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


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]. T is computed, since -1 is ambiguous if K is 0."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
