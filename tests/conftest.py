"""What every test gets: one thread, a seed, an end if it hangs, a guard over torch's globals; and `gpu` tests are skipped without a GPU."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from narrowgauge.ops import registry, selfcheck, triton
from narrowgauge.ops.cpp.build import compiler_name
from narrowgauge.ops.registry import Device
from tests.distributed.ranks import Ranks

# The same examples on every run and machine; the time of one example says nothing on shared cores.
hypothesis.settings.register_profile("narrowgauge", derandomize=True, deadline=None)

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """One thread, so that the order of a sum does not depend on the machine; Ctrl-C as on a terminal.

    A shell starts what runs in its background with SIGINT ignored, and so would be the processes that tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("narrowgauge")
    _one_cache_per_configuration()
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())  # type: ignore[union-attr]  # as it is while no test is captured
    # A sentence that a test of the optimizers asks for by name; the others only meet it.
    if shutil.which(compiler_name()) is None:
        config.addinivalue_line(
            "filterwarnings", "ignore:narrowgauge.optim steps in plain torch:RuntimeWarning"
        )
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if not _is_controller(config):
        gc.disable()  # until all modules are imported: what they make stays


def _is_controller(config: pytest.Config) -> bool:
    """Whether this process hands tests to workers of pytest-xdist: it collects none, so nothing would turn gc on again."""
    return not hasattr(config, "workerinput") and bool(config.getoption("numprocesses", None))


def _one_cache_per_configuration() -> None:
    """Inductor's cache does not tell capabilities of the CPU apart: a test would be handed the kernels of another run.

    Beside the folder that is named or torch's own; processes that a test starts, and workers, take the same.
    """
    made_for = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        shutil.which(compiler_name()),
    )
    part = "-" + hashlib.sha256(repr(made_for).encode()).hexdigest()[:12]
    folder = (
        os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder if folder.endswith(part) else folder + part


def pytest_collection_finish() -> None:
    """Modules and tests count as old for good, so that the collections that tests ask for see what tests made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> Iterator[None]:
    """What the tests of a file have imported counts as old from then on: a run collects all the rest, and a worker has many runs."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nothing frees it, and bindings complain of leaks when the process ends


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # what is slow on several ranks is a matter of `make test-ranks`
        # A parameter of that name is not the fixture.
        given = item.callspec.params if hasattr(item, "callspec") else ()
        uses_ranks = "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in given
        on_ranks = uses_ranks or item.path.name in ("test_torchrun.py", "test_examples.py")
        if on_ranks and item.get_closest_marker("slow"):
            item.add_marker("ranks")
    # Begun last, one process would wait for it alone.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


# Times the limit of a test. pytest-timeout's is a signal, handled between two lines of Python: a deadlock outside of it never ends.
_HUNG = 1.25


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs where no signal is handled ends its process, with every thread's traceback; xdist starts another and goes on."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(_HUNG * limit_s, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# Without a GPU torch.manual_seed keeps a call, with its traceback, for each kind of device that may come yet: milliseconds of every test.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What runs print on standard error, line by line, before it becomes text: a Reason has its code."""
    from narrowgauge.train import console

    found: list[object] = []

    def recorded(text: object, **options: Any) -> None:
        found.append(text)
        print(text, **options)

    monkeypatch.setattr(console, "print", recorded, raising=False)
    return found


@pytest.fixture
def nothing_was_compiled() -> None:
    """Where earlier tests of this process compiled anything, no weight is watched (`bypassed_weights.has_compiled`)."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.counters["frames"].clear()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, in any order and alone."""
    _seed(0)


# Name -> how to read it, how to put it back.
_GLOBALS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "grad enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic debug mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
}
if torch.cuda.is_available():  # left on, it fails all that follow
    _GLOBALS["sync debug mode"] = (torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode)


@pytest.fixture(autouse=True)
def globals_kept() -> Iterator[None]:
    """Fails a test that leaves one of torch's globals changed, and puts it back for the next."""
    before: dict[str, Any] = {name: read() for name, (read, _) in _GLOBALS.items()}
    yield
    changed = []
    for name, (read, write) in _GLOBALS.items():
        if read() != before[name]:
            changed.append(f"{name}: {before[name]} -> {read()}")
            write(before[name])
    assert not changed, "the test left torch's globals changed: " + "; ".join(changed)


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Puts variables of the environment back that a test has set.

    transformers' TrainingArguments(torch_compile=True) set variables by which Accelerate compiles every later model,
    and Accelerate keeps what it has read.
    """
    own = "PYTEST_CURRENT_TEST"  # pytest writes it at every phase
    before = {name: value for name, value in os.environ.items() if name != own}
    yield
    for name in os.environ.keys() - before.keys() - {own}:
        del os.environ[name]
    os.environ.update(before)
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._shared_state.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """How many -> those ranks: the same processes for all tests of a worker, which import what a run needs once."""
    pools: dict[int, Ranks] = {}
    yield lambda world: pools.setdefault(world, Ranks(world))
    for pool in pools.values():
        pool.close()


@pytest.fixture
def device_is(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """device_is(facts): what devices of that type are for the rest of the test; `of`: devices of another type. The one place for it."""

    def install(facts: Device, of: str = "") -> None:
        name = "cuda_facts" if (of or facts.type) == "cuda" else "cpu_facts"
        monkeypatch.setattr(registry, name, lambda *_: facts)

    return install


@pytest.fixture(params=[False, True], ids=["plain-cpu", "fast-cpu"])
def cpu(request: pytest.FixtureRequest, device_is: Callable[..., None]) -> Device:
    """The test runs on a CPU without and on one with bfloat16 and VNNI instructions, whatever it runs on.

    torch's portable bfloat16 GEMM stands in where the processor has none: it too sums in float32 and rounds once.
    """
    facts = Device("cpu", bf16_gemm=request.param, int8_gemm=request.param)
    device_is(facts)
    return facts


@pytest.fixture
def triton_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton were here, of the version that torch brings, and a C compiler."""
    monkeypatch.setattr(triton, "unavailable", lambda: "")


@pytest.fixture
def no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no kernel had been checked yet."""
    monkeypatch.setattr(selfcheck, "RESULTS", {})


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh float memory is NaN, fresh integer memory the largest value: a kernel that skips an element is seen.

    For kernel tests: `pytestmark = pytest.mark.usefixtures("poisoned_memory")`.
    """
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)  # torch fills uninitialized memory in this mode
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture
def gpu(poisoned_memory: None) -> torch.device:
    """A device that Triton takes; fresh memory on it is NaN or the largest integer."""
    reason = triton.refuse("cuda", torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason.text)
    return torch.device("cuda")
