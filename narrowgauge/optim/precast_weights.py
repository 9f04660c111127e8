"""Low-precision casts of weights, written by the optimizer step and read by the next forward.

    casts = optimizer.cast_weights(model)       once; the trainer calls it if it helps
    print(casts)                                for each QLinear: the cast that the step writes, or
    the reason against it

Forward then need not read the weights to cast them. `ops.quantize.precast_weight` describes the
casts, and when a stale cast is rejected. Only the Triton step on NVIDIA GPUs writes them, and only
eager forward passes read them. Compiled passes fuse the cast with surrounding operations, and CUDA
graphs have a graph of their own for it (`GraphedStep`). Losses and weights are bit-identical with
and without.

Each step examines the layer again, so a new recipe, a moved weight, or a new amax history takes
effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from narrowgauge.addresses import identity, wrapper
from narrowgauge.errors import Reason
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize.precast_weight import PrecastWeight, refuse_here

if TYPE_CHECKING:
    from narrowgauge.nn.amax_history import AmaxHistory


@dataclass(eq=False)
class _Link:
    """One layer and the cast that the step writes for it.

    fixed    permanent reason against a cast (a clause), or ''
    reason   present reason against a cast, or ''
    stepped  buffers of the cast, or None
    made_of  inputs of the last decision; held, because they are compared by identity
    """

    name: str
    layer: nn.Linear
    fixed: str = ""
    reason: str = ""
    stepped: PrecastWeight | None = None
    made_of: tuple[Any, ...] = ()

    def now(self, parameter: Tensor) -> PrecastWeight | None:
        layer = self.layer
        # `convert(model, None)` has turned the layer back into a Linear.
        if not isinstance(layer, QLinear):
            self.reason, self.stepped, self.made_of = "an ordinary Linear", None, ()
            return None
        history = layer.amax_history("w")
        memory = () if history is None else (identity(history.live), identity(history.history))
        own = layer._parameters.get("weight") is parameter
        # Compared by identity while `made_of` holds them: equality of recipes is slow to compute.
        made_of = (
            id(layer.recipe),
            id(history),
            own,
            identity(parameter),
            parameter.dtype,
            parameter.device,
            *memory,
        )
        if made_of != self.made_of[2:] or layer.state.precast is not self.stepped:
            self.made_of, self.reason, self.stepped = (
                (layer.recipe, history, *made_of),
                self.fixed,
                None,
            )
            if not self.reason:
                self._decide(layer, parameter, history, own)
            layer.state.precast = self.stepped
        return None if self.stepped is None or self.stepped.refused else self.stepped

    def _decide(
        self, layer: QLinear, parameter: Tensor, history: AmaxHistory | None, own: bool
    ) -> None:
        if not own:
            self.reason = Reason(
                "another-parameter", "its weight is another parameter now, or computed from one"
            )
        elif hidden_by := wrapper(parameter):
            self.reason = Reason("wrapper", f"a {hidden_by} hides the memory of its weight")
        elif parameter.is_meta:
            self.reason = Reason("no-memory", "its weight has no memory yet")
        elif not parameter.is_contiguous() or parameter.numel() == 0:
            self.reason = (
                Reason("not-contiguous", "its weight is not contiguous")
                if parameter.numel()
                else Reason("empty", "its weight is empty")
            )
        else:
            cast, self.reason = None, Reason("no-recipe", "an ordinary Linear")
            if layer.recipe is not None:
                cast, self.reason = layer.plan(parameter.device).step_cast()
            if cast is not None:
                self.reason = refuse_here(parameter, cast)
                self.stepped = (
                    None if self.reason else PrecastWeight.of(parameter.detach(), cast, history)
                )

    def words(self, counts: bool = True) -> str:
        if self.stepped is None or self.stepped.refused:
            return self.reason if self.stepped is None else self.stepped.refused
        code, what = (
            ("amax", "amax")
            if self.stepped.codes is None
            else ("codes", "codes in both orientations")
        )
        taken = f", taken after {self.stepped.taken} of {self.stepped.left} steps"
        return Reason(code, what + taken * counts)


class WeightCasts(Mapping[str, str]):
    """Mapping from the name of a QLinear to a description of its cast; printable.

    If the step writes no cast, the description is the reason.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        known = set(parameters)
        layers = [
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, QLinear)
        ]
        users: dict[Tensor, list[str]] = {}
        for name, layer in layers:
            weight = layer._parameters.get("weight")
            if weight is not None:
                users.setdefault(weight, []).append(name)
        self._links: dict[str, _Link] = {}
        self._by_parameter: dict[Tensor, _Link] = {}
        for name, layer in layers:
            weight = layer._parameters.get("weight")
            link = self._links[name] = _Link(name, layer)
            if layer.is_expert:
                link.reason = link.fixed = Reason(
                    "experts", "it is one matrix of a parameter that all experts share"
                )
            elif weight is None:
                link.reason = link.fixed = Reason(
                    "computed", "its weight is computed from another parameter"
                )
            elif layer.is_transposed:
                link.reason = link.fixed = Reason(
                    "transposed", "its weight is stored transposed, and the step's codes lie as it"
                )
            elif others := [each for each in users[weight] if each != name]:
                link.reason = link.fixed = Reason(
                    "shared", f"its weight is also that of {', '.join(others)}, which casts it too"
                )
            elif weight not in known:
                link.reason = link.fixed = Reason(
                    "no-parameter", "its weight is no parameter of this optimizer"
                )
            else:
                self._by_parameter[weight] = link
                link.now(weight)

    def of(self, parameter: Tensor) -> PrecastWeight | None:
        """Return the buffers for the cast of the parameter's next step, or None.

        The present state of the layer decides.
        """
        link = self._by_parameter.get(parameter)
        return None if link is None else link.now(parameter)

    def release(self) -> None:
        """Let all layers cast their weights in forward again."""
        for link in self._links.values():
            if isinstance(link.layer, QLinear) and link.layer.state.precast is link.stepped:
                link.layer.state.precast = None

    def summary(self) -> list[str]:
        """One line for each kind of cast or reason, with the number of layers."""
        counts: dict[str, int] = {}
        for link in self._links.values():
            words = link.words(counts=False)
            counts[words] = counts.get(words, 0) + 1
        return [
            f"{words}: {count} layer{'s' if count > 1 else ''}" for words, count in counts.items()
        ]

    def __getitem__(self, name: str) -> str:
        return self._links[name].words()

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {words}" for name, words in self.items())
