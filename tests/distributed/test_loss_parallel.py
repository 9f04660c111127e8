"""The chunked loss over a head whose words are sharded, against one process (bounded: sums over ranks are in another order)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from narrowgauge.errors import ConfigError
from narrowgauge.memory import chunked_cross_entropy
from tests.raising import require

TOKENS, WIDTH = 24, 16
# float64: a sum of V exponentials in another order, and of ranks' parts, differs by some units of 2**-53.
NEAR = 1e-13
OPTIONS = {
    "plain": {},
    "capped": {"softcap": 3.0, "z_loss": 0.1, "chunk": 5},
    "unchecked": {"checked": True, "z_loss": 0.01},
}


def _inputs(words: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [2, T / 2, K], weight [V, K], bias [V], targets [2, T / 2] of which some are ignored."""
    generator = torch.Generator().manual_seed(words)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 2
        for shape in ((2, TOKENS // 2, WIDTH), (words, WIDTH), (words,))
    )
    targets = torch.randint(0, words, (2, TOKENS // 2), generator=generator)
    targets[0, 3] = targets[1, 0] = -100
    return hidden, weight, bias, targets


def _result(loss: Tensor, count: Tensor, *leaves: Tensor) -> list[Tensor]:
    (loss / count).backward()
    found = [loss, count, *(leaf.grad for leaf in leaves)]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach() for each in found]


def _alone(words: int, options: str) -> list[Tensor]:
    hidden, weight, bias, targets = _inputs(words)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    return _result(
        *chunked_cross_entropy(hidden, weight, targets, bias=bias, **OPTIONS[options]), *leaves
    )


def _on_ranks(words: int, options: str, cut: int | None, compiled: bool = False) -> list[Tensor]:
    """cut: the axis of hidden along which ranks hold parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias, targets = _inputs(words)
    lies = Replicate() if cut is None else Shard(cut)
    leaves = [
        nn.Parameter(distribute_tensor(each, mesh, [how]))
        for each, how in ((hidden, lies), (weight, Shard(0)), (bias, Shard(0)))
    ]
    function = (
        torch.compile(chunked_cross_entropy, backend="aot_eager")
        if compiled
        else chunked_cross_entropy
    )
    found = function(leaves[0], leaves[1], targets, bias=leaves[2], **OPTIONS[options])
    return _result(*found, *leaves)


@pytest.mark.parametrize("words", [40, 31, 1], ids=["even", "uneven", "one word"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cut", [None, 1], ids=["replicated", "cut along tokens"])
def test_loss_and_gradients_are_those_of_one_process(ranks, words, options, cut):
    alone, found = _alone(words, options), ranks(2)(_on_ranks, words, options, cut)
    for these in found:
        for this, other, first in zip(these, alone, found[0], strict=True):
            torch.testing.assert_close(this, other, rtol=NEAR, atol=NEAR)
            assert torch.equal(this, first)


@pytest.mark.slow
def test_compiled(ranks):
    for this, other in zip(
        ranks(2)(_on_ranks, 40, "plain", None, True)[1], _alone(40, "plain"), strict=True
    ):
        torch.testing.assert_close(this, other, rtol=NEAR, atol=NEAR)


def _poisoned() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, _, targets = _inputs(40)
    weight[37] = torch.nan
    head = distribute_tensor(weight, mesh, [Shard(0)])
    loss, _ = chunked_cross_entropy(distribute_tensor(hidden, mesh, [Replicate()]), head, targets)
    return bool(loss.isnan())


def test_a_poisoned_word_of_one_rank_shows_on_all(ranks):
    assert ranks(2)(_poisoned) == [True, True]


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias, targets = _inputs(40)
    head = distribute_tensor(weight, mesh, [Shard(0)])
    everywhere = distribute_tensor(hidden, mesh, [Replicate()])
    words = []
    for given in (
        (hidden, head, None),
        (everywhere, distribute_tensor(weight, mesh, [Shard(1)]), None),
        (everywhere, head, bias),
    ):
        with pytest.raises(ConfigError) as raised:
            chunked_cross_entropy(given[0], given[1], targets, bias=given[2])
        words.append(raised.value)
    return words


def test_what_does_not_say_how_it_lies_is_refused(ranks):
    for plain, columns, bias in ranks(2)(_refusals):
        require(plain, "chunked-loss.hidden-mesh", "from_local(hidden, mesh")
        require(columns, "chunked-loss.weight-placement", "Shard(dim=1)", "ColwiseParallel")
        require(bias, "chunked-loss.bias-placement")
