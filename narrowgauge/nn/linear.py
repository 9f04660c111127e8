"""The Linear that a user touches: `linear`, a function, and QLinear, an nn.Linear whose products follow a recipe.

Autocast decides the type of the output, as it does for nn.Linear; operands are cast from the tensors as they come. The products
themselves are in linear_function.py.
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
_NOT_COPIED = ("_cache", "precast", "observer", "peers", "gathered", "watch", "_step_watch")  # None in a copy
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In eager mode torch's `apply` without its 2 us of looking for transforms, and into what these left behind, in every argument.
_APPLY: Any = super(torch.autograd.Function, LinearFunction).apply
_UNWRAPPED: Any = torch._C._functorch.unwrap_if_dead
_REFUSALS, _TRANSFORMS = "narrowgauge.nn.linear_refusals", "narrowgauge.nn.transforms"  # modules that few layers need


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] -> [..., N], differentiable in all three, by `recipe`.

    The result has autocast's dtype, or x's where autocast is off. Raises ShapeError on a wrong last axis, and ConfigError on a recipe with
    memory (delayed scaling, learned steps, sampling), which needs a QLinear.
    """
    if not isinstance(recipe, Recipe) or recipe.has_memory:
        imported(_REFUSALS, "refuse_recipe")(recipe)
    _check(x, weight, bias, recipe)
    plan = plan_of(recipe, x.device, wrapper(x, weight))
    is_cpu = device_facts(x.device.type, x.device.index).type == "cpu"
    context = LinearContext(plan, _out_dtype(x), keeps_x=is_cpu and not plan.x.transposes)
    y: Tensor = LinearFunction.apply(_rows(x), weight, bias, context, None, None, None)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class QLinear(nn.Linear):
    """nn.Linear whose products follow a recipe. `layer.recipe` may be changed at any time, to a Recipe, its name, or None.

    Changing it drops the state of the old recipe; learned steps that the new one has too stay the same parameters and begin anew.
    Loading a state without any of the recipe's own leaves that as it is, and warns; one that has a part of it must have all.

    observer   sees every operand in eager mode, and results if it asks for them; see `Observer` and `observer.ProductObserver`
    reason     why `convert` chose another recipe than the one asked for, for `describe`; '' if it did not
    decision   what recipe "auto" decided for the layer (narrowgauge.conversion.auto.Decision), None where it did not
    """

    scaling: nn.ModuleDict | None
    steps: LearnedSteps | None
    sampling: RowSampling | None
    __prepare_scriptable__ = imported(_TRANSFORMS, "refuse_script")  # looked for by torch.jit.script
    qconfig = property(None, imported(_TRANSFORMS, "refuse_qconfig"))  # set by torch.ao.quantization

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, recipe: Recipe | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self._become(recipe)

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: Recipe | str | None) -> QLinear:
        """Turns an nn.Linear into a QLinear in place: its identity, parameters, hooks and users stay the same."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module._become(recipe)
        return module

    def _become(self, recipe: Recipe | str | None) -> None:
        self.observer: Observer | None = None
        self.is_suspended = False
        self.reason = ""
        self.decision: object | None = None
        self.precast: PrecastWeight | None = None  # what the optimizer's step leaves of the weight's cast
        self.shared_inputs: SharedInputs | None = None  # casts of x are shared with the layers that have the same
        self.peers: Any = None  # what `distribute` knows of the ranks that hold the layer (distributed.state.Peers)
        self.gathered: Any = None  # the weight as the codes that ranks sent (distributed.weights.GatheredWeight)
        self.frozen: Any = None  # the weight as codes, if it was frozen as such (nn.frozen.FrozenWeight)
        self.warned_of_ranks = self.warned_of_eval = self.warned_of_float16 = False
        self.float16_steps = 0
        self.weight_codes: WeightCodes = "auto"  # see `recasts`
        self.reads_last = False  # whether nobody read its last input after it
        self.called = self.bypassed = False  # in this step; whether its weight is multiplied without it (nn.reached)
        self.missed, self.watch = 0, None
        self.step_ended = False  # by an optimizer of torch, and no other has begun: the next `advance` has none to end
        self._cache: WeightCache | None = None
        self._step_watch: StepWatch | None = None  # for steps that nothing ends
        # Whether its weight was written behind casts that were reused; read at a later step's end (step_end).
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
            from narrowgauge import recipes  # a Recipe needs none of the names

            recipe = recipes.get(recipe)
        if recipe is not None and not isinstance(recipe, Recipe):
            imported(_REFUSALS, "refuse_recipe")(recipe, "QLinear.recipe")
        self.refuse(recipe)
        self.compute_as(recipe)
        self.reason, self.decision = "", None
        with torch.inference_mode(False):  # what inference mode makes cannot be trained later
            self.renew_state()

    def refuse(self, recipe: Recipe | None) -> None:
        """Raises ConfigError where it cannot take the recipe."""
        if self.frozen is not None and not self.frozen.serves(recipe):
            raise ConfigError(
                f"QLinear.recipe: the weight was frozen as codes of recipe {self._recipe and self._recipe.name!r}, which no other recipe "
                "reads. Call narrowgauge.memory.thaw(model) first, which gives back what they decode to."
            )

    def compute_as(self, recipe: Recipe | None) -> None:
        """Takes a recipe without its state: amax windows, learned steps and sampling stay those of the recipe before."""
        self._recipe, self._plans, self._step_watch = recipe, {}, None
        self.empty_cache()

    def renew_state(self) -> None:
        """Amax windows, learned steps and sampling of a new recipe. Steps that it shares with the old one stay the same parameters.

        New ones train if the weight does: a layer that was frozen before stays frozen as a whole.
        """
        device, recipe = self.weight.device, self._recipe
        windows, steps, samples = {}, {}, {}
        if recipe is not None:
            windows, steps, samples = recipe.windows(), recipe.steps(), recipe.samples()
        self.scaling = self.sampling = None
        if windows:
            from narrowgauge.nn.amax_history import AmaxHistory

            self.scaling = nn.ModuleDict({role: AmaxHistory(each, device) for role, (each, _) in windows.items()})
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
        """Forgets the quantized weight. keep=True: from now on keep casts until the next call (what `advance` does).

        What the optimizer's step left of the cast stays with keep=True: it is of the weight as it is now, if that is unchanged.
        """
        before = self._cache
        if keep or before is not None:
            from narrowgauge.nn.weight_cache import WeightCache  # where steps end

            before = before or WeightCache()
            for changed in (before.changed, None if self.precast is None else self.precast.taken_changed()):
                if changed is not None:
                    from narrowgauge.ops.fingerprint import Readback

                    self.suspects += (Readback(changed),)
            self._cache = before.renewed(self.recasts)
        if not keep and self.precast is not None:
            self.precast.forget()
        if self.carried is not None:
            self.carried.invalidate()

    @property
    def carried(self) -> Any:
        """Who has the weight as codes while the parameter has no memory; None: the parameter has it."""
        return self.gathered if self.frozen is None else self.frozen

    @contextmanager
    def keeping_apart(self) -> Iterator[None]:
        """Casts of its weight that are made inside are kept as from the first `advance` on, and give way to those of before at the end."""
        before = self._cache
        if before is None or not before.is_given:
            from narrowgauge.nn.weight_cache import WeightCache

            self._cache = WeightCache(recasts=self.recasts)
        try:
            yield
        finally:
            self._cache = before

    def stop_keeping(self) -> None:
        """As before the first `empty_cache(keep=True)`: no casts of its weight are kept from call to call."""
        self._cache = None

    @property
    def recasts(self) -> bool:
        """Whether backward casts the weight again instead of keeping codes of it from forward on."""
        device = self.weight.device
        return chosen(self.weight_codes, device_facts(device.type, device.index).type) == "recast"

    def _keeps_x(self, plan: LinearPlan, device: torch.device) -> bool:
        """See `LinearContext`: a CPU does of what is cast along T apart, unless it was asked to cast again instead of keeping."""
        if plan.x.transposes or plan.recipe.save != "quantized" or self.weight_codes == "recast":
            return False
        return device_facts(device.type, device.index).type == "cpu"

    def kept_casts(self) -> list[Casts]:  # of its weight, from call to call
        return [] if self._cache is None else [self._cache.casts]

    def end_step(self) -> None:
        """What the end of a step is for every layer, whatever its recipe: nothing made of the weight or of an input is kept."""
        self.empty_cache(keep=True)
        if self.shared_inputs is not None:
            self.shared_inputs.clear()
        self._step_watch = None

    def take_casts(self, casts: Casts) -> None:
        """Computes with these casts of its weight, whatever becomes of it, until the next `empty_cache`."""
        from narrowgauge.nn.weight_cache import WeightCache

        self._cache = WeightCache(casts, is_given=True)

    def forward(self, input: Tensor) -> Tensor:
        x, compiling = input, is_compiling()
        if not compiling:
            self.__dict__["called"] = True  # past torch's `__setattr__`, which takes a microsecond
            if self.frozen is not None:
                self.frozen.check(self)  # may drop the codes, which `carried` names then no longer
        carried = self.carried
        if carried is not None:
            if not compiling:
                if self.frozen is None:
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
        parameters = self._parameters  # a parametrized weight is none of them
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
        if type(weight).__name__ == "DTensor" or type(x).__name__ == "DTensor":
            from narrowgauge.nn.sharded import Locals

            local = Locals(x, weight, bias, None if compiling else self._any_state())
            x, weight, bias, owner = local.x, local.weight, local.bias, local.owner
        context, inputs = self.context(x, self._cache if torch.is_grad_enabled() else None), None
        if not compiling:
            if self.shared_inputs is not None and (inputs := self.shared_inputs.of(x, self, owner)) is not None:
                context.sources["x"] = [inputs]
            if (window := self.window("x")) is not None:
                context.x_window = self._window_key(window, inputs)
            if context.cache is not None and context.cache.recasts and self._recipe.save == "quantized":
                from narrowgauge.nn.kept_inputs import stays  # where codes of an input are kept

                context.keeps_x = stays(x)
            if context.grads and self.training and self._remembers:
                if self.step_ended:
                    self.step_ended = False
                self._expect_advance(weight)
        try:
            y: Tensor = apply(_rows(x), weight, bias, context, *self._states(x, weight, context, local))
            if x.ndim != 2:
                y = y.reshape(*x.shape[:-1], weight.shape[0])
            return y if local is None else local.wrap(y)
        except RuntimeError as error:
            raise imported(_TRANSFORMS, "explained")(error, x, weight, bias)  # noqa: B904
        finally:
            context.sources.pop("x", None)  # backward keeps the context, not the casts
            if inputs is not None:
                inputs.was_read(self)

    def _window_key(self, window: AmaxHistory, inputs: InputCasts | None) -> Hashable:
        """See `LinearContext.x_window`. From now on the window has seen the input."""
        lineage, groups = window.lineage(), () if self.peers is None else tuple(map(id, self.peers.groups))
        if self.training:
            window.saw(next(NUMBERS) if inputs is None else inputs.number)
        return None if inputs is None or lineage is None else (lineage, groups)

    @_disable_dynamo
    def _forward_eagerly(self, x: Tensor) -> Tensor:
        """Between two graphs of a compiled model: a graph would read the weight, which has no numbers."""
        return self.forward(x)

    def context(self, x: Tensor, cache: WeightCache | None = None) -> LinearContext:
        """What its products need for an input like x. cache: where casts of the weight are kept, in eager mode only."""
        assert self._recipe is not None
        steps, sampling, out_dtype = self.steps, self.sampling, _out_dtype(x)
        is_cold, sampled = steps is not None and steps.is_cold, () if sampling is None else sampling.active
        if is_compiling():
            plan = plan_of(self._recipe, x.device)
            by_rows = self.peers is not None
            found = LinearContext(plan, out_dtype, self.training, is_cold=is_cold, sampled=sampled, by_rows=by_rows)
            found.keeps_x = self._keeps_x(plan, x.device)
            device = self.weight.device.type
            found.keeps_w = self.carried is None and chosen(self.weight_codes, device, compiled=True) == "step"
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
        wide = out_dtype == x.dtype == torch.float32 and weight is not None and weight.dtype == torch.float32
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
        """Warns, once, of a training loop without `advance`: the weight is written again and again, and no step ends."""
        if weight.is_inference():
            return
        if self._step_watch is None:
            from narrowgauge.nn.step_watch import StepWatch  # where a recipe remembers

            self._step_watch = StepWatch()
        self._step_watch.look(self, weight)

    def amax_state(self, role: str) -> Tensor | None:
        """What the window of a role ("x", "w" or "gy") holds of this step (`ops.quantize.amax_state`); None without one."""
        window = self.window(role)
        return None if window is None else window._buffers["live"]

    @property
    def _remembers(self) -> bool:
        """Whether the recipe added state to the layer."""
        modules = self._modules  # the table, since an attribute of a torch module takes a microsecond
        return bool(modules) and any(modules.get(name) is not None for name in _ADDED)

    def _any_state(self) -> Tensor | None:
        """A buffer that the recipe added to the layer, or None."""
        return next(self.buffers(), None) if self._remembers else None

    def window(self, role: str) -> AmaxHistory | None:
        """The amax window of a role ("x", "w" or "gy"); None without one."""
        scaling = self._modules.get("scaling")
        return None if scaling is None else scaling._modules.get(role)  # type: ignore[return-value]

    def _states(
        self, x: Tensor, weight: Tensor, context: LinearContext, local: Locals | None
    ) -> tuple[Tensor | None, ...]:
        """Its tensors besides weight and bias: amax windows, or steps and the readings of the sampler."""
        if (scaling := self._modules.get("scaling")) is not None:
            windows: list[Any] = [scaling._modules.get(role) for role in PRODUCTS]
            return tuple([None if window is None else window._buffers["live"] for window in windows])
        variance = None if self.sampling is None or not self.training else self.sampling.live
        if self.steps is None:
            return None, None, variance
        from narrowgauge.nn.straight_through import steps_in_use

        found = steps_in_use(self.steps, _rows(x), weight, context.plan.recipe, writes=self.training)
        if local is not None:
            found = local.step(found[0], "x"), local.step(found[1], "w")
        return *found, variance

    def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        """As ever; asked without arguments, as torch's ColwiseParallel and its kin ask for what to cut, the layer alone.

        What a recipe added is the same on all ranks, and has no weight.
        """
        return super().named_modules(*given, **named) if given or named else iter([("", self)])

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ever; but learned steps stay as they are: ColwiseParallel cuts and hands back all that named_parameters lists."""
        if not name.startswith("steps."):
            super().register_parameter(name, param)

    def train(self, mode: bool = True) -> QLinear:
        """As ever; and `eval`, or a change of mode, forgets the quantized weight, since averaged weights are swapped in around it."""
        if mode != self.training or not mode:
            self.empty_cache()
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> QLinear:
        """model.to(...), and all that moves or converts the weight: its casts are made anew."""
        if self.frozen is None:
            super()._apply(fn, recurse)
        else:
            self.frozen.move(self, lambda: super(QLinear, self)._apply(fn, recurse))
        self.empty_cache()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As ever; a weight that was frozen as codes is decoded when somebody reads it, and its codes are beside it."""
        if self.frozen is not None:
            self.frozen.check(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        from narrowgauge.nn.linear_state import load

        load(self, super()._load_from_state_dict, state_dict, prefix, *rest)

    def plan(self, device: torch.device, hidden_by: str = "", wide: bool = False) -> LinearPlan:
        """What its recipe means on a device, worked out once; see `LinearPlan.of`."""
        if (plan := self._plans.get((device, hidden_by, wide))) is None:
            assert self._recipe is not None
            plan = self._plans[device, hidden_by, wide] = plan_of(self._recipe, device, hidden_by, wide)
        return plan

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={None if self._recipe is None else self._recipe.name}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.frozen is not None:
            self.frozen.hold(self)
        step_end.follow_layer(self)

    def __getstate__(self) -> dict[str, Any]:
        """What copy and pickle take: all but the cached casts, those of the optimizer's step, and the observer."""
        frozen = {} if self.frozen is None else self.frozen.copied(self)
        return self.__dict__ | dict.fromkeys(_NOT_COPIED) | {"_plans": {}, "step_ended": False, "suspects": ()} | frozen


def _out_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64:  # no autocast there; and as nn.Linear, it leaves float64 alone
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> None:
    """Refuses in words what the products would compute wrongly or stumble over."""
    fits = is_compiling() or not (
        torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
        or torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack()  # modes, as that of make_fx
    )  # fmt: skip
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        is_dense = isinstance(tensor, Tensor) and tensor.dtype in _FLOATS and tensor.layout == torch.strided
        fits = fits and is_dense and not tensor.is_nested and tensor.device == x.device
    fits = fits and weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[1]
    if fits and (bias is None or (bias.ndim == 1 and bias.shape[0] == weight.shape[0])):
        return
    imported(_REFUSALS, "refuse")(x, weight, bias, _FLOATS, recipe)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]. K may be 0, where -1 for T would have no meaning."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
