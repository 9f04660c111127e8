"""LowPrecisionOptimizer: the torch.optim.Optimizer around the update rules, with quantized states.

state[parameter] holds plain tensors: `step` (float32, as in torch), and for each moment NAME

    NAME             codes of the parameter's shape; 4-bit codes are [rows, ceil(columns / 2)]
                     uint8; float32 if the state is fp32
    NAME_scale       [rows, tiles] bfloat16
    NAME_expansion   [rows, tiles] int8, fp8 alone
    master, master_scale, remainder     see masters.py

`state_dict` therefore contains only tensors and plain values, is exact, and can be stored as
safetensors. States of a DTensor parameter are DTensors with the same placements (`shards.py`).
`param_groups.state_format` chooses the format: 1-D and small tensors, rows too short for a tile, and
embeddings known by name stay in float32.

The step does not search gradients for NaN or infinity, because the search would cost another pass.
Clipping or a GradScaler does it, and `skipped_steps` describes skipped steps. A non-finite gradient is
never hidden: float32 states become non-finite in that element, quantized states in the whole tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from narrowgauge.addresses import holds_numbers, identity, in_memory
from narrowgauge.errors import ConfigError, OptionError
from narrowgauge.optim import (
    backends,
    moments,
    noise,
    old_states,
    param_groups,
    rules,
    shards,
    states,
)
from narrowgauge.optim.cuda_graph import ReplayedStep
from narrowgauge.optim.precast_weights import WeightCasts
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.skipped_steps import SkippedSteps
from narrowgauge.optim.state_dict import forms_of, placed, refuse_state, upgraded
from narrowgauge.optim.step import DTYPES, ParamStep, new_state

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Kernel
    from narrowgauge.optim.masters import Master
    from narrowgauge.optim.moments import States

Backend = Literal["auto", "triton", "native", "torch"]
# Pairs "first/second" are valid too, see states.py.
StateName = Literal["fp32", "8bit", "fp8", "fp8-lm", "4bit"] | str
Embeddings = Literal["fp32", "same"]


class BackwardStepper(Protocol):
    """Interface of `step_in_backward.InBackward`, which steps parameters inside backward."""

    def hook_group(self, place: int) -> None: ...
    def run(self, closure: Callable[[], Any]) -> Any: ...
    def end_step(self) -> None: ...
    def clear(self) -> None: ...


class GradientStore(Protocol):
    """Interface of `held_gradients.HeldGradients`, which stores gradients in FP8 until the step."""

    def hook_group(self, place: int) -> None: ...
    def step(self) -> None: ...
    def clear(self) -> None: ...


def _signature_of(kind: type[LowPrecisionOptimizer]) -> inspect.Signature:
    """Signature of an optimizer's class, with the numbers of its rule by name and position."""
    params, *shared = (
        each
        for each in list(inspect.signature(LowPrecisionOptimizer.__init__).parameters.values())[1:]
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    )
    own = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)
        for name, value in kind.rule.numbers.items()
    ]
    return inspect.Signature([params, *own, *shared])


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers: the constructor of every rule, its groups, step and states.

        params      parameters, named parameters, groups, or a model (then `groups(model)`). A group
                    may set its own `states`, and its own `rule` ("lion" or a `rules.Rule`) with
                    that rule's options
        numbers     numbers of the rule, also by position: `Rule.numbers`
        states      format of both moments, with the bytes per parameter of AdamW: fp32 8, 8bit
                    2.02, fp8 2.05, fp8-lm 3.02, 4bit 1.03. A pair such as "8bit/fp16" sets each
                    moment, see states.py
        master      master weights of 16-bit parameters, see masters.py; None if all parameters are
                    float32 (else ConfigError)
        embeddings  "fp32": parameters with the name of an embedding keep float32 states, because
                    their rows have rare gradients and then move far; "same" treats them as any
                    other. Names are known only from a model or named parameters
        seed        seed of all stochastic rounding
        backend     "triton": one kernel for many tensors, on NVIDIA GPUs; "native": step.cpp, on
                    the CPU; "torch": plain torch in chunks. All compute the same numbers. "auto":
                    the first available backend, with a warning if it is plain torch

    Attributes:

    rule         update rule of groups that name no rule
    backend      "auto" or the name of a backend, see `backends`
    casting      WeightCasts if the step also casts weights, else None
    stepping     InBackward if the optimizer steps inside backward, else None
    holding      HeldGradients if gradients are stored in FP8, else None
    found_inf    0-d float that skips the next step if it is not 0, or None; see `skipped_steps`
    halted       0-d float that skips all further steps if it is not 0, or None; see `skipped_steps`
    norm_before  gradient norm of the previous step for clip="previous", else None
    """

    rule: ClassVar[Rule]
    # For help() and inspect: the arguments of the class's own rule.
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "rule" in vars(cls):
            cls.__signature__ = _signature_of(cls)

    def __init__(
        self,
        params: Any,
        *numbers: Any,
        states: StateName = "fp32",
        master: Master = None,
        embeddings: Embeddings = "fp32",
        seed: int = 0,
        backend: Backend = "auto",
        **named_numbers: Any,
    ) -> None:
        # Raises TypeError for unknown and repeated arguments, as a written signature would.
        bound = self.__signature__.bind(params, *numbers, **named_numbers)
        bound.apply_defaults()
        defaults = {name: bound.arguments[name] for name in self.rule.numbers}
        defaults |= {"states": states, "master": master, "embeddings": embeddings, "seed": seed}
        if backend not in ("auto", *backends.NAMES):
            names = ", ".join(map(repr, ("auto", *backends.NAMES)))
            raise OptionError(
                f"{type(self).__name__}: backend = {backend!r}; it is one of {names}.",
                code="optim.backend",
            )
        self.backend: Backend = backend
        # Custom rules of the parameter groups, by name. A group holds the name alone, so that
        # state_dict stays plain.
        self._rules: dict[str, Rule] = {}
        # Parameter names, if known; they determine the noise of a parameter.
        self._names: dict[Tensor, str] = {}
        self._forget_steps()
        self.casting: WeightCasts | None = None
        self.stepping: BackwardStepper | None = None
        self.holding: GradientStore | None = None
        # Set by a scaler or the trainer, see `skipped_steps`.
        self.found_inf: Tensor | None = None
        self.halted: Tensor | None = None
        # A tensor during training, so that no host sync is needed. A loaded state gives a float.
        self.norm_before: Tensor | float | None = None
        super().__init__(
            self._not_empty(params, defaults["embeddings"]),
            defaults | {"form": moments.FORM, "previous_lr": 0.0},
        )
        self._refuse_master_without_effect()

    def _not_empty(self, params: Any, embeddings: str) -> Any:
        """Return the parameters or groups to pass to torch.

        Raises ConfigError with the cause if there are none.
        """
        kind = type(self).__name__
        if isinstance(params, nn.Module):
            found = param_groups.groups(params, embeddings=embeddings)
            if not found:
                frozen = sum(parameter.numel() for parameter in params.parameters())
                raise ConfigError(
                    f"{kind}: {type(params).__name__} has no parameter that requires a gradient"
                    + (
                        f"; all {frozen:,} are frozen. Unfreeze a layer."
                        if frozen
                        else ". Pass the model that trains."
                    ),
                    code="optim.nothing-trains",
                )
            return found
        if isinstance(params, Tensor):
            # torch raises a TypeError with an explanation.
            return params
        if not isinstance(params, Iterable):
            raise ConfigError(
                f"{kind}: {params!r} has no parameters. Pass the model, or a list of its parameters.",
                code="optim.no-parameters",
            )
        params = list(params)
        if not params:
            raise ConfigError(
                f"{kind}: the list of parameters is empty. Pass the model, or parameters that train; a generator that was read "
                "before is empty, and so is a filter on requires_grad when all layers are frozen.",
                code="optim.empty-list",
            )
        return params

    def _forget_steps(self) -> None:
        self._skipped = SkippedSteps()
        self._param_steps: dict[Tensor, ParamStep] = {}
        # Launch tables and similar objects that a backend caches between steps.
        self._kept: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return super().__getstate__() | {
            "backend": self.backend,
            "_rules": self._rules,
            "_names": self._names,
            "norm_before": self.norm_before,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._names = getattr(self, "_names", {})
        self._forget_steps()
        # A copied optimizer has no WeightCasts: they refer to the layers of the original.
        self.casting = getattr(self, "casting", None)
        # A copied optimizer has no hooks: they are registered on the original's parameters.
        self.stepping = getattr(self, "stepping", None)
        self.holding = getattr(self, "holding", None)
        self.norm_before = getattr(self, "norm_before", None)
        self.found_inf = self.halted = None
        for group in self.param_groups:
            # `torch.save` of a whole optimizer bypasses load_state_dict, so its earlier form is
            # converted here.
            if "states" in group and old_states.is_old(group):
                for parameter in group["params"]:
                    if parameter in self.state:
                        self.state[parameter] = old_states.converted(
                            self.state[parameter], group, self._rule_of(group)
                        )
                group["form"] = moments.FORM
            # A state saved by torch's own optimizer lacks our options.
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "rule" in param_group:
            rule = param_group["rule"]
            if isinstance(rule, Rule):
                self._rules[rule.name] = rule
                # A name instead of the object, because state_dict holds plain values only.
                param_group["rule"] = rule.name
            for option, value in self._rule_of(param_group).options.items():
                param_group.setdefault(option, value)
        # torch fills in the defaults first: `_check_group` reads the complete group.
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except BaseException:
            # torch has appended the group already; a refused group must not stay.
            self.param_groups.pop()
            raise
        group = self.param_groups[-1]
        self._names |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
        if self.stepping is not None:
            self.stepping.hook_group(len(self.param_groups) - 1)
        if self.holding is not None:
            self.holding.hook_group(len(self.param_groups) - 1)

    def _rule_of(self, group: Mapping[str, Any]) -> Rule:
        return rules.get(group["rule"], self._rules) if "rule" in group else self.rule

    def _check_group(self, group: Mapping[str, Any]) -> None:
        kind, rule = type(self).__name__, self._rule_of(group)
        param_groups.check(kind, group, {"rule": None, **self.defaults, **rule.options}, rule)
        if self.backend != "auto":
            for device in dict.fromkeys(parameter.device for parameter in group["params"]):
                if reason := backends.refuse(self.backend, device, rule):
                    raise ConfigError(
                        f'{kind}: backend = "{self.backend}" cannot be had here. {reason}',
                        code="optim.backend-unavailable",
                    )
        whole = rule.granularity == "matrix"
        for parameter in group["params"]:
            if reason := shards.refuse(parameter, whole) or param_groups.refuse(
                parameter, group["master"]
            ):
                raise ConfigError(
                    f"{kind}: a parameter of {list(parameter.shape)} is {parameter.dtype}: {reason}",
                    code="optim.parameter-kind",
                )
        param_groups.warn_of_cut_tiles(kind, group)

    def _refuse_master_without_effect(self) -> None:
        """Raise ConfigError for a master if every parameter is float32.

        Beside 16-bit parameters, some parameters may be float32.
        """
        found = [group["master"] for group in self.param_groups if group["master"] is not None]
        types = [parameter.dtype for parameter, _, _ in self._indexed()]
        # `types` is empty on a rank without parameters under ZeRO.
        if found and types and all(each == torch.float32 for each in types):
            raise ConfigError(
                f"{type(self).__name__}: master = {found[0]!r} has no effect: all parameters are float32, and such a weight is its own "
                "master. Leave it out, or convert the model to bfloat16 before the optimizer is built.",
                code="optim.master-float32",
            )

    # Not compiled: Dynamo would treat tensors cached from the last step as constants. torch.optim
    # imports this private decorator too.
    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Returns the result of `closure`, or None without a closure.
        """
        return self._step_all(closure)

    @_disable_dynamo
    @torch.no_grad()
    def _step_all(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step` without the hooks that torch runs around it.

        ZeRO uses it for a rank's part, because the hooks belong to the step of the whole optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure() if self.stepping is None else self.stepping.run(closure)
        if self.stepping is not None:
            self.stepping.end_step()
        if self._begin():
            if self.holding is not None:
                self.holding.step()
            self._step([each for each in self._indexed() if each[0].grad is not None])
            self._skipped.end()
        self.record_learning_rates()
        return loss

    def record_learning_rates(self) -> None:
        """Store the learning rates for `rules.fall` at the next call.

        Skipped calls count: on a GPU the host does not know which steps were skipped.
        """
        for group in self.param_groups:
            group["previous_lr"] = float(group["lr"])

    def _begin(self) -> bool:
        """Return False if the host sees that this step must be skipped; see `skipped_steps`."""
        flags, known = [x for x in (self.found_inf, self.halted) if x is not None], self._skipped
        # Also True without any flag. On a GPU, reading a flag would be a host sync.
        sees = all(map(known.seen_by_host, flags))
        members = frozenset[Tensor]()
        if not sees:
            members = frozenset(
                parameter for parameter, _, _ in self._indexed() if parameter.grad is not None
            )
        if known.must_settle(
            members, not sees and self.found_inf is not None and self._counts_on_device()
        ):
            self.settle()
        self._skipped.begin(*((None, None) if sees else (self.found_inf, self.halted)), members)
        return not (sees and any(map(bool, flags)))

    def _counts_on_device(self) -> bool:
        """Return True if the kernels select a step's constants by the number of skipped steps."""
        chosen = [
            each.backend[1].kernel.name
            for each in self._param_steps.values()
            if each.backend is not None
        ]
        return self.holding is None and "torch" not in chosen

    def settle(self, skipped: Sequence[bool] | None = None) -> None:
        """Subtract the steps that the device skipped from the step counters.

        skipped  for each step until now, the latest last: whether it was skipped. None reads
                  the count from the device, which is a host sync
        """
        known = self._skipped
        count = known.count() if skipped is None else sum(skipped[len(skipped) - known.uncertain :])
        if count:
            counters = [self.state[parameter]["step"] for parameter in known.members]
            torch._foreach_sub_(counters, float(count))
        self._skipped = SkippedSteps()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also drops gradients held in FP8 and unfinished accumulation sums."""
        super().zero_grad(set_to_none)
        for each in (self.holding, self.stepping):
            if each is not None:
                each.clear()

    def _indexed(self) -> Iterator[tuple[Tensor, dict[str, Any], int]]:
        """Yield each parameter with its group and its noise number.

        The number is derived from the parameter's name if known, else from its position.
        """
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                name = self._names.get(parameter)
                yield parameter, group, place if name is None else noise.of_name(name)
                place += 1

    def _step(self, chosen: list[tuple[Tensor, dict[str, Any], int]]) -> None:
        if not chosen:
            return
        if any(each[0].is_cuda for each in chosen) and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"{type(self).__name__}: a step inside a CUDA graph would repeat the learning rate and step count of its capture. "
                "Make optimizer.replayable() before the capture, call its capture() instead of step(), and its before_replay() "
                "before each replay.",
                code="optim.captured",
            )
        param_steps = self._next(chosen)
        skipped = (self._skipped,) if self._skipped.is_possible else ()
        strided: list[ParamStep] = []
        by_backend: dict[str, tuple[Any, list[ParamStep]]] = {}
        for (parameter, _, _), each in zip(chosen, param_steps, strict=True):
            each.gradient = _usable(
                shards.local_gradient(parameter) if each.is_shard else parameter.grad
            )
            # `weight` is then a contiguous copy of a strided parameter, copied back after the step.
            if identity(each.weight) != each.address:
                strided.append(each)
                each.weight.copy_(each.source.reshape(each.weight.shape))
            kernel = self._kernel(each)
            by_backend.setdefault(kernel.name, (kernel, []))[1].append(each)
        for kernel, members in by_backend.values():
            kernel.run(members, self._kept, *skipped)
        for each in strided:
            each.source.copy_(each.weight.view(each.source.shape))
        # Kernels write through raw pointers, which autograd cannot see. Code that caches results of
        # a weight compares its version.
        torch.autograd.graph.increment_version([parameter for parameter, _, _ in chosen])
        torch.autograd.graph.increment_version(
            [each.source for each in param_steps if each.is_shard]
        )
        for (parameter, _, _), each in zip(chosen, param_steps, strict=True):
            # Otherwise the memory would outlive the parameter's own gradient.
            each.gradient = None
            if each.stepped is not None:
                each.stepped.commit(parameter)

    def _next(
        self, chosen: list[tuple[Tensor, dict[str, Any], int]], counts: bool = True
    ) -> list[ParamStep]:
        """Return the next step of each parameter, with its constants and noise key.

        counts  False leaves the step counters unchanged, for a look ahead
        """
        param_steps = [self._param_step(parameter, group) for parameter, group, _ in chosen]
        counters = [each.state["step"] for each in param_steps]
        if counts:
            # Counters are float32 tensors on the CPU, as in torch: reading them below is no GPU
            # sync.
            torch._foreach_add_(counters, 1.0)
        # Fake counters have no values. They are taken as 1: shapes are the same at every step.
        counted = (
            torch.stack(counters).tolist()
            if all(map(holds_numbers, counters))
            else [1.0] * len(counters)
        )
        found: dict[tuple[int, float], list[tuple[Any, int]]] = {}
        for (_, group, number), each, count in zip(chosen, param_steps, counted, strict=True):
            step, shared = int(count) + (not counts), found.get((id(group), count))
            if shared is None:
                # One set of constants for each number of skipped steps that is still possible; the
                # kernel selects.
                steps = range(step, step - self._skipped.uncertain - 1, -1)
                shared = [
                    (self._rule_of(group).constants(group, n), noise.step_key(group["seed"], n))
                    for n in steps
                ]
                found[id(group), count] = shared
            ((each.constants, each.step_key), *others), each.number = shared, number
            each.if_skipped = tuple(others)
        return param_steps

    def replayable(self) -> ReplayedStep:
        """Return a ReplayedStep for a CUDA graph; call it before the capture. See `cuda_graph`."""
        return ReplayedStep(self)

    def _kernel(self, param_step: ParamStep) -> Kernel[backends.BackendSpec]:
        """Return the backend of a step.

        It is chosen again if the dtype, the 16-byte alignment or the class of the gradient changes.
        """
        gradient = param_step.gradient
        assert gradient is not None
        key = gradient.dtype, identity(gradient) % 16 == 0, type(gradient)
        if param_step.backend is None or param_step.backend[0] != key:
            param_step.backend = key, backends.choose(param_step, self.backend)
        kernel: Kernel[backends.BackendSpec] = param_step.backend[1].kernel
        return kernel

    def cast_weights(self, model: nn.Module | None) -> WeightCasts | None:
        """From now on, let the step also cast the weights of the model's QLinears where possible.

        model: None ends the casts. Results stay bit-identical, because the next forward pass finds
        the cast that it would have computed. The returned WeightCasts, also stored as `casting`,
        prints the cast of each layer or the reason against one. See `precast_weights.py`.
        """
        if self.casting is not None:
            self.casting.release()
        self.casting = (
            None if model is None else WeightCasts(model, [each for each, _, _ in self._indexed()])
        )
        return self.casting

    def computed_by(self, parameter: Tensor) -> str:
        """Name of the backend that steps a parameter.

        If plain torch replaces a kernel, a reason follows: "torch (compute capability 7.5, needs
        8.0)".
        """
        return str(self._computed_by(parameter))

    def _computed_by(self, parameter: Tensor) -> backends.ComputedBy:
        group = next(
            group
            for group in self.param_groups
            if any(each is parameter for each in group["params"])
        )
        return backends.computed_by(
            self._param_steps.get(parameter), parameter.device, self.backend, self._rule_of(group)
        )

    def _param_step(self, parameter: Tensor, group: dict[str, Any]) -> ParamStep:
        """Return the parameter's ParamStep, cached while parameter and state keep their memory."""
        state, asked = self.state[parameter], param_groups.asked(group)
        if not state:
            self._refuse_converted(parameter, group)
            state.update(self._new_state(parameter, group, parameter.device))
        found = self._param_steps.get(parameter)
        if found is not None and found.asked != asked:
            raise ConfigError(
                f"{type(self).__name__}: states, master and embeddings of a group were {found.asked} when its state was made, and are "
                f"{asked} now. A state keeps its form: build another optimizer for it.",
                code="optim.group-changed",
            )
        if found is None or not found.holds(parameter, state):
            self._refuse_converted(parameter, group, state)
            found = ParamStep.of(parameter, *self._formats(parameter, group), state, asked=asked)
            self._param_steps[parameter] = found
            # Cached batches would keep the tensors of the old step alive.
            self._kept.clear()
        stepped = None if self.casting is None else self.casting.of(parameter)
        if stepped is not found.stepped:
            found.stepped, found.native, found.backend = stepped, None, None
            self._kept.clear()
        return found

    def _refuse_converted(
        self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Tensor] | None = None
    ) -> None:
        """Raise ConfigError if a parameter's dtype or shape changed after construction."""
        kind = f"{type(self).__name__}: a parameter of {list(parameter.shape)} is {parameter.dtype} now"
        if reason := param_groups.refuse(parameter, group["master"]):
            raise ConfigError(
                f"{kind}, which it was not when the optimizer was built: {reason}",
                code="optim.parameter-changed",
            )
        if state is not None and forms_of(state) != forms_of(
            self._new_state(parameter, group, "meta")
        ):
            raise ConfigError(
                f"{kind}, and its state was made when it had another type or shape. Convert the model before the optimizer is "
                "built.",
                code="optim.parameter-form",
            )

    def _formats(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Rule, States, Master]:
        """Return (rule, states, master), the arguments of `new_state` and `ParamStep.of`."""
        kept = states.named(param_groups.state_format(parameter, group)[0])
        return self._rule_of(group), kept, param_groups.master_of(parameter, group, kept.tile)

    def _new_state(
        self, parameter: Tensor, group: Mapping[str, Any], device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return a new state.

        A DTensor gets DTensors with its placements. For "meta", tensors are plain and of the full
        shape.
        """
        kept = self._formats(parameter, group)
        if not shards.is_sharded(parameter):
            return new_state(parameter, *kept, device)
        whole = new_state(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), *kept, "meta"
        )
        if device == "meta":
            return whole
        state = new_state(shards.local(parameter), *kept, device)
        return {
            name: x if name == "step" else shards.wrapped(x, parameter, whole[name].shape)
            for name, x in state.items()
        }

    def _local_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state that this rank would store for a parameter, as meta tensors."""
        own = torch.empty(shards.local(parameter).shape, dtype=parameter.dtype, device="meta")
        return new_state(own, *self._formats(parameter, group), "meta")

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with `norm_before` in the groups for clip="previous".

        Reading `norm_before` and the skipped steps (`settle`) is a host sync. Groups of SGD contain
        dampening = 0, because torch.optim.SGD cannot step from a loaded state without it.
        """
        self.settle()
        found = super().state_dict()
        for group in found["param_groups"]:
            if self._rule_of(group) is rules.SGD:
                group["dampening"] = 0.0
        if self.norm_before is not None:
            for group in found["param_groups"]:
                group["norm_before"] = float(self.norm_before)
        return found

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `load_state_dict` would refuse the state."""
        new_state = lambda each, group: self._new_state(each, group, "meta")  # noqa: E731
        refuse_state(type(self).__name__, state_dict, self.param_groups, self.rule.name, new_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state exactly, without a change of dtype.

        DTensor parameters accept DTensors of the same placements, or whole tensors, from which
        every rank takes its part. Raises CheckpointError, before any change, if formats differ or
        values are not finite.
        """
        own = self.param_groups
        found = upgraded(state_dict, own, self._rule_of)
        self.check_state_dict(found)
        # torch casts every state tensor to the parameter's dtype. So states are set below, by the
        # position of their parameter, and torch loads the groups alone.
        super().load_state_dict({"state": {}, "param_groups": found["param_groups"]})
        self.norm_before = None
        for group in self.param_groups:
            self.norm_before = group.pop("norm_before", None)
        places = {each: parameter for group, saved in zip(own, found["param_groups"], strict=True)
                  for each, parameter in zip(saved["params"], group["params"], strict=True)}  # fmt: skip
        for place, saved in found["state"].items():
            parameter = places[place]
            self.state[parameter] = {
                name: value.detach().clone().to("cpu")
                if name == "step"
                else placed(value, parameter)
                for name, value in saved.items()
                if isinstance(value, Tensor)
            }
        self._forget_steps()


def _usable(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise ConfigError(
            "narrowgauge.optim: a sparse gradient. Build the nn.Embedding with sparse=False.",
            code="optim.sparse-gradient",
        )
    if gradient.dtype not in DTYPES:
        gradient = gradient.to(torch.float32)
    return in_memory(gradient).contiguous()
