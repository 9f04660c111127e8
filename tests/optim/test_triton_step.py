"""The optimizer's kernel on a GPU: the bits of plain torch on the CPU (exact), no waiting for the device, few launches, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.optim import SGD, AdamW, Lion, state_bytes
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from tests.compare import assert_same
from tests.raising import raises

pytestmark = pytest.mark.gpu

MASTERS = [
    (None, torch.float32), *((master, torch.bfloat16) for master in KINDS if master), ("fp32", torch.float16),
    ("fp16-scaled", torch.float16), ("stochastic", torch.float16),
]  # fmt: skip
SHAPES = ((8, 557), (33, 2048), (3, 130, 17), (77,), (1, 4097), (0, 5))


def gradients(parameters: list[nn.Parameter], step: int, poison: float | None = None) -> None:
    """Nine decades, a zero row, a zero column, subnormal numbers; the same on every device."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        shape = parameter.shape
        g = (
            torch.randn(shape, generator=generator)
            * torch.exp(3 * torch.randn(shape, generator=generator))
            * 1e-3
        )
        if g.ndim == 2 and len(g) > 1:
            g[1], g[:, 7], g[0, :5] = 0.0, 0.0, 1e-39
            g[:, 40:80] = 1e-3  # held, see `rules.bound`
            g[:, 80:120] *= step == 0  # only decays
            g[:, 120:140] *= 1e-6**step
            if poison is not None:
                g[-1, 300] = poison
        parameter.grad = g.to(parameter.dtype).to(parameter.device)


def trained(
    build, device: torch.device, dtype: torch.dtype, poison: float | None = None, **options
):
    torch.manual_seed(4)
    parameters = [
        nn.Parameter((torch.randn(shape) * 0.02).to(dtype).to(device)) for shape in SHAPES
    ]
    optimizer = build(parameters, backend="triton" if device.type == "cuda" else "torch", **options)
    for step in range(4):
        gradients(parameters, step, poison)
        optimizer.step()
    return [p.detach().cpu() for p in parameters], optimizer.state_dict()["state"]


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("master", "dtype"), MASTERS, ids=str)
def test_the_kernel_has_the_bits_of_the_definition(gpu, states, master, dtype):
    """Odd and empty sizes, poisoned memory; every state, master and type."""
    for build in (AdamW, Lion, SGD):
        options = {"states": states, "master": master, "lr": 1e-2, "weight_decay": 0.1}
        assert_same(
            trained(build, gpu, dtype, **options),
            trained(build, torch.device("cpu"), dtype, **options),
        )


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_poison_stays_where_the_definition_has_it(gpu, states, poison):
    options = {"states": states, "master": "fp16-scaled"}
    found = [
        trained(AdamW, device, torch.bfloat16, poison, **options)
        for device in (gpu, torch.device("cpu"))
    ]
    assert_same(*found, any_nan=True)


def test_a_step_waits_for_nothing_and_takes_few_launches(gpu, monkeypatch):
    """Two groups of narrow matrices and one of vectors: three launches, one copy, no synchronisation."""
    from narrowgauge.optim.triton import launch

    parameters = [nn.Parameter(torch.randn(64, 512, device=gpu)) for _ in range(20)]
    vectors = [nn.Parameter(torch.randn(512, device=gpu)) for _ in range(20)]
    groups = [
        {"params": parameters[:10]},
        {"params": parameters[10:], "lr": 1e-4},
        {"params": vectors},
    ]
    optimizer = AdamW(groups, states="8bit")
    for _ in range(2):  # proves and compiles
        gradients([*parameters, *vectors], 0)
        optimizer.step()
    launches = []
    whole = launch.launch
    monkeypatch.setattr(
        launch, "launch", lambda *call, **options: launches.append(whole(*call, **options))
    )
    gradients([*parameters, *vectors], 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(launches) == 3
    assert {row.backend for row in state_bytes(optimizer).rows} == {"triton"}


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, None), (torch.bfloat16, "stochastic")], ids=str
)
def test_weights_cast_by_the_step_change_no_number(gpu, recipe, dtype, master):
    """Sizes with short bands and tiles; outputs, weights, states and windows of four steps, and nothing waits in the last."""
    found = []
    for casts in (True, False):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(288, 560), nn.GELU(), nn.Linear(560, 272)).to(gpu, dtype)
        model = ng.convert(model, recipe)
        optimizer = AdamW(model.parameters(), states="8bit", master=master, lr=1e-2)
        if casts:
            told = optimizer.cast_weights(model)
            if ", taken" not in told["0"]:
                pytest.skip(told["0"])
        ng.advance(model)
        batches = [torch.randn(64, 288, device=gpu, dtype=dtype) for _ in range(4)]
        outputs = []
        for number, x in enumerate(batches):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number == 3 else "default")
            try:
                y = model(x)
                y.float().square().mean().backward()
                optimizer.step()
                ng.advance(model)
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            outputs.append(y.detach())
        if casts:
            assert all("taken after 3 of 4 steps" in words for words in told.values()), str(told)
        found.append((outputs, dict(model.state_dict()), optimizer.state_dict()["state"]))
    assert_same(*found)


def test_a_replayed_step_is_the_step(gpu):
    """Captured once and replayed with changing gradients and rates: the bits of stepping."""
    found = []
    for captured in (True, False):
        torch.manual_seed(2)
        parameters = [nn.Parameter(torch.randn(64, 512, device=gpu).bfloat16()) for _ in range(3)]
        optimizer = AdamW(parameters, states="8bit", master="stochastic", lr=1e-2)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

        def fill(step: int, parameters=parameters) -> None:
            for number, parameter in enumerate(parameters):
                generator = torch.Generator().manual_seed(10 * step + number)
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))

        fill(0)
        optimizer.step()
        if captured:
            graph, replayed = torch.cuda.CUDAGraph(), optimizer.replayable()
            with torch.cuda.graph(graph):
                replayed.capture()
        for step in range(1, 4):
            fill(step)
            optimizer.param_groups[0]["lr"] *= 0.5
            if captured:
                replayed.before_replay()
                graph.replay()
            else:
                optimizer.step()
        found.append(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    assert_same(*found)


def test_a_captured_step_without_its_numbers_is_refused(gpu, monkeypatch):
    parameter = nn.Parameter(torch.randn(64, 512, device=gpu))
    optimizer = AdamW([parameter], states="8bit")
    parameter.grad = torch.zeros_like(parameter)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(ConfigError, "optim.captured"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2**15, 2**15 + 1])
def test_more_than_two_to_the_31_elements(gpu, columns):
    """The last rows, of element numbers that 32 bits do not hold, step as they do alone."""
    rows = 2**16 + 8
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16, device=gpu))
    weight.grad = torch.zeros_like(weight)
    weight.grad[-2:] = torch.randn(2, columns).bfloat16().to(gpu)
    optimizer = AdamW([weight], states="8bit", master="bf16-remainder", weight_decay=0.0)
    optimizer.step()
    last = nn.Parameter(torch.zeros(2, columns, dtype=torch.bfloat16))
    last.grad = weight.grad[-2:].cpu()
    alone = AdamW([last], states="8bit", master="bf16-remainder", weight_decay=0.0, backend="torch")
    alone.step()
    # Noise differs: it is of the element's number. The first moment and the weight do not see it.
    assert_same(weight.detach()[-2:].cpu(), last.detach())
    for name in ("exp_avg", "exp_avg_scale", "remainder"):
        assert_same(optimizer.state[weight][name][-2:].cpu(), alone.state[last][name])
    assert not weight.detach()[:-2].any()
