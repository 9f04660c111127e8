"""Memory of optimizer states, by format and reason, with the backend that computes the step."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.optim.backends import ComputedBy
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.param_groups import state_format
from narrowgauge.optim.shards import local


@dataclass(kw_only=True)
class StateRow:
    """Parameters with the same states, reason and backend.

    states        name of the state format
    rule          reason for the format, see `param_groups.state_format`
    backend       "triton", "native", or "torch" with a reason; '' for an optimizer of another
                  library
    slow_because  the reason alone, if plain torch replaces a kernel; else ''
    state_bytes   bytes of states and masters, with scales and step counts
    """

    states: str
    rule: str
    backend: str
    slow_because: str
    tensors: int = 0
    parameters: int = 0
    weight_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class StateBytes:
    """Table returned by `state_bytes`; printable."""

    rows: tuple[StateRow, ...]
    _by_parameter: Mapping[Tensor, int] = field(default_factory=dict, repr=False, compare=False)

    def of(self, parameter: Tensor) -> int:
        """Bytes of one parameter's states and master.

        Raises ConfigError if the optimizer does not hold the parameter.
        """
        if parameter not in self._by_parameter:
            raise ConfigError(
                f"state_bytes: the optimizer holds no parameter of {list(parameter.shape)} that is this one. "
                "Build it from all parameters, before any are frozen.",
                code="state-bytes.parameter",
            )
        return self._by_parameter[parameter]

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def total(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    @property
    def per_parameter(self) -> float:
        return self.total / max(self.parameters, 1)

    def __str__(self) -> str:
        lines = [
            [
                "states",
                "because",
                "tensors",
                "parameters",
                "bytes",
                "bytes per parameter",
                "computed by",
            ]
        ]
        tensors = sum(row.tensors for row in self.rows)
        whole = StateRow(
            states="all", rule="", backend="", slow_because="", tensors=tensors, parameters=self.parameters, state_bytes=self.total
        )  # fmt: skip
        for row in (*self.rows, whole):
            sizes = f"{row.tensors}", f"{row.parameters:,}", f"{row.state_bytes:,}"
            lines.append(
                [
                    row.states,
                    row.rule,
                    *sizes,
                    f"{row.state_bytes / max(row.parameters, 1):.3f}",
                    row.backend,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def state_bytes(optimizer: torch.optim.Optimizer) -> StateBytes:
    """Return the memory of an optimizer's states and masters; for DTensors, of this rank's part.

    Existing states are measured. Before the first step, optimizers of narrowgauge are computed from
    their formats. The bytes of other optimizers without a state are reported as 0.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"state_bytes: {optimizer!r} is no optimizer. Pass a torch.optim.Optimizer.",
            code="state-bytes.optimizer",
        )
    # For ZeRO, measure this rank's inner optimizer.
    if isinstance(local_one := getattr(optimizer, "optim", None), LowPrecisionOptimizer):
        optimizer = local_one
    rows: dict[tuple[str, str, ComputedBy], StateRow] = {}
    by_parameter: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            if isinstance(optimizer, LowPrecisionOptimizer):
                states, rule = state_format(parameter, group)
                by = optimizer._computed_by(parameter)
                state = state or optimizer._local_state(parameter, group)
            else:
                states, rule, by = "foreign", type(optimizer).__name__, ComputedBy("", "")
            new = StateRow(states=states, rule=rule, backend=str(by), slow_because=by.why)
            row = rows.setdefault((states, rule, by), new)
            size = by_parameter[parameter] = sum(map(_bytes, state.values()))
            row.tensors += 1
            row.parameters += local(parameter).numel()
            row.weight_bytes += local(parameter).numel() * parameter.element_size()
            row.state_bytes += size
    return StateBytes(tuple(rows.values()), by_parameter)


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of states that do not exist yet, for parameters that train and have not stepped.

    Optimizers of other libraries take one step with small parameters to find out. Returns 0 if this
    is impossible.
    """
    new = [(group, each) for group in optimizer.param_groups for each in group["params"]
           if each.requires_grad and not optimizer.state.get(each)]  # fmt: skip
    if isinstance(optimizer, LowPrecisionOptimizer):
        return sum(
            _bytes(x) for group, each in new for x in optimizer._local_state(each, group).values()
        )
    if isinstance(
        getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None),
        torch.optim.Optimizer,
    ):
        # A wrapper of another optimizer cannot be stepped on its own.
        return 0
    return sum(_bytes_of_step(optimizer, group, local(each)) for group, each in new)


def _bytes_of_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> int:
    """Estimate state bytes from a step of a parameter with size 2 along each axis."""
    small = torch.nn.Parameter(
        torch.zeros([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    )
    small.grad = torch.zeros_like(small)
    probe = copy.copy(optimizer)
    probe.state, probe.param_groups = defaultdict(dict), [{**group, "params": [small]}]
    try:
        # Unwrapped, because torch's step hooks must not see a step that is none.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(probe)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):
        return 0
    tensors = [x for x in probe.state[small].values() if isinstance(x, Tensor)]
    return sum(
        x.element_size() * (parameter.numel() if x.shape == small.shape else x.numel())
        for x in tensors
    )


def _bytes(x: Any) -> int:
    """Bytes of a tensor, or of the inner tensors of a subclass such as torchao's states."""
    if not isinstance(x, Tensor):
        return 0
    inner: Iterable[str] = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()
    parts = [getattr(x, name) for name in inner]
    return sum(map(_bytes, parts)) if parts else x.numel() * x.element_size()
