"""How exact are sums of gradients over ranks that travel as one byte per number? On gradients of a small Llama in training.

    python -m tests.distributed.gradient_messages            2 ranks run, 2 to 64 simulated; about five minutes on one core

A Llama of 2 blocks learns Python's standard library, byte by byte, for 300 steps. Then each of 64 ranks computes the gradient of a
micro-batch of its own, and four of the tensors are summed over 2, 4, ... 64 ranks by each method:

    bf16             a ring: each hop adds in float32 and rounds to bfloat16
    fp8              reduce-scatter and all-reduce of `distributed.messages`
    fp8, two hops    the same over nodes of 8 ranks, as DDP does it (all-reduce)
    fp8-lm           the reduce-scatter of `distributed.shared_scale`, after 1,000 messages of its controller
    control          a ring that sums in E4M3, one shared scale that leaves room for the sum (1/N): what a collective on FP8 numbers does

The truth is the sum in float64 of the float32 gradients. For each tensor: the error in dB below it, and the slope of the result on it
(1 unless numbers are lost on one side). `failures` says what must hold of "fp8"; the control must fail it. Simulated ranks are threads
that run the package's own functions on a link between them; 2 real ranks (gloo) must give the same bits.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, record
from narrowgauge.distributed import messages, shared_scale
from narrowgauge.distributed.ddp_gradients import Fp8AllReduceHook
from narrowgauge.distributed.gradient_state import Gradients
from narrowgauge.distributed.messages import Link
from narrowgauge.distributed.shared_scale import BufferLayout, Controller
from narrowgauge.formats import E4M3

NODE = 8
TENSORS = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.1.mlp.down_proj",
    "lm_head",
)
LEAST_DB = {
    "reduce-scatter": 31.0,
    "all-reduce": 28.0,
    "two hops": 25.0,
}  # two hops round once more
LEAST_DB_AT_64 = 36.0  # of a reduce-scatter
LARGEST_SLOPE_ERROR = 0.005
SETTLED = 1000  # messages after which mu of fp8-lm has found its range


# --- gradients --------------------------------------------------------------------------------------------------------------------


def python_sources(least_bytes: int = 2_000_000) -> Tensor:
    """The beginning of the standard library, in the order of its file names: uint8."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= least_bytes:
            break
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def gradients(
    ranks: int, *, hidden: int = 256, steps: int = 300, batch: int = 8, length: int = 128
) -> list[dict[str, Tensor]]:
    """For each rank the gradients of TENSORS by a micro-batch of its own, after so many steps of training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=length, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    data, generator = python_sources(), torch.Generator().manual_seed(0)

    def backward() -> None:
        starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
        ids = data[starts + torch.arange(length)].long()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        optimizer.step()
    found = []
    for _ in range(ranks):
        backward()
        found.append({name: model.get_parameter(f"{name}.weight").grad.clone() for name in TENSORS})  # type: ignore[union-attr]
    return found


# --- ranks as threads -------------------------------------------------------------------------------------------------------------


class Meeting:
    """Where the threads of a group leave what they send."""

    def __init__(self, size: int) -> None:
        self.left: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=600)

    def exchange(self, rank: int, sent: Tensor) -> list[Tensor]:
        self.left[rank] = sent
        self.barrier.wait()
        found = list(self.left)
        self.barrier.wait()
        return found


class ThreadLink(Link):
    """A Link between threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.left)
        self.bytes_sent, self.calls = Counter(), Counter()

    def all_to_all(self, rows: Tensor) -> Tensor:
        self._count("all-to-all", rows)
        return torch.stack([sent[self.rank] for sent in self.meeting.exchange(self.rank, rows)])

    def all_gather(self, row: Tensor) -> Tensor:
        found = torch.stack(self.meeting.exchange(self.rank, row))
        self._count("all-gather", found)
        return found

    def all_reduce_max(self, numbers: Tensor) -> Tensor:
        found = torch.stack(self.meeting.exchange(self.rank, numbers.clone())).amax(0)
        return numbers.copy_(found)

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        found = torch.stack(self.meeting.exchange(self.rank, numbers.clone())).sum(0)
        return numbers.copy_(found)


def on_threads(ranks: int, function: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(function, range(ranks)))


def _whole(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts)[: like.numel()].view(like.shape)


def _same(results: list[Tensor]) -> Tensor:
    for result in results[1:]:
        assert torch.equal(result, results[0]), "ranks differ"
    return results[0]


# --- methods: the gradients of all ranks -> their sum -------------------------------------------------------------------------------


def fp8_reduce_scatter(each: list[Tensor]) -> Tensor:
    meeting = Meeting(len(each))
    parts = on_threads(
        len(each),
        lambda rank: messages.reduce_scatter(
            messages.as_rows(each[rank], len(each)), ThreadLink(meeting, rank)
        ),
    )
    return _whole(parts, each[0])


def fp8_all_reduce(each: list[Tensor]) -> Tensor:
    meeting = Meeting(len(each))
    return _same(
        on_threads(
            len(each), lambda rank: messages.all_reduce(each[rank], ThreadLink(meeting, rank))
        )
    )


def fp8_two_hops(each: list[Tensor]) -> Tensor:
    nodes = len(each) // NODE
    within, across = [Meeting(NODE) for _ in range(nodes)], [Meeting(nodes) for _ in range(NODE)]

    def reduced(rank: int) -> Tensor:
        node, local = divmod(rank, NODE)
        hook = Fp8AllReduceHook(
            Gradients("fp8", "sum"),
            {},
            ThreadLink(within[node], local),
            ThreadLink(across[local], node),
        )
        return hook.reduced(
            each[rank].reshape(-1), BufferLayout(("w",), (each[rank].numel(),))
        ).view(each[rank].shape)

    return _same(on_threads(len(each), reduced))


def fp8_lm_reduce_scatter(each: list[Tensor], mu: float) -> Tensor:
    meeting = Meeting(len(each))

    def reduced(rank: int) -> Tensor:
        controller = Controller()
        controller.load_state_dict({"w": mu}, ["w"])
        rows = messages.as_rows(each[rank], len(each))
        return shared_scale.reduce_scatter(
            rows, BufferLayout(("w",), (rows.numel(),)), ThreadLink(meeting, rank), controller
        )

    return _whole(on_threads(len(each), reduced), each[0])


def settled_mu(each: list[Tensor]) -> float:
    """mu after so many messages like this one. Only the share that saturates counts, so nothing is sent."""
    controller, magnitudes = Controller(), torch.stack([x.abs() for x in each])
    amax, numbers, is_valid = (
        magnitudes.amax(),
        torch.tensor([magnitudes.numel()]),
        torch.tensor([True]),
    )
    largest = (
        magnitudes.flatten()
        .topk(max(1, 2 * int(shared_scale.OVERFLOW_SHARE * magnitudes.numel()) + 1))
        .values
    )
    for _ in range(SETTLED):
        limit = amax / controller.mu(["w"], amax.device) * (1 + 2**-22)
        controller.update(["w"], (largest > limit).sum().view(1), numbers, is_valid)
    return controller.state_dict()["w"]


def bf16_ring(each: list[Tensor]) -> Tensor:
    total = each[0].bfloat16()
    for x in each[1:]:
        total = (total.float() + x.bfloat16().float()).bfloat16()
    return total.float()


def fp8_ring(each: list[Tensor]) -> Tensor:
    """The control: sums in E4M3."""
    scale = torch.stack([x.abs().amax() for x in each]).amax() * len(each) / E4M3.max
    total = E4M3.round(each[0] / scale)
    for x in each[1:]:
        total = E4M3.round(total + E4M3.round(x / scale))
    return total * scale


# --- what is asked of them --------------------------------------------------------------------------------------------------------


def quality(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """(dB of the error below the truth, slope of the result on the truth)."""
    found = found.double()
    power = truth.square().sum()
    return float(10 * torch.log10(power / (found - truth).square().sum())), float(
        (found * truth).sum() / power
    )


def failures(kind: str, ranks: int, db: float, slope: float) -> list[str]:
    """Why a result is not good enough; kind is a key of LEAST_DB."""
    least = LEAST_DB_AT_64 if ranks >= 64 and kind == "reduce-scatter" else LEAST_DB[kind]
    found = [] if db >= least else [f"{db:.1f} dB is below {least:g}"]
    return found + (
        [] if abs(slope - 1) <= LARGEST_SLOPE_ERROR else [f"slope {slope:.4f} is not 1"]
    )


METHODS: dict[str, tuple[str, Callable[[list[Tensor]], Tensor]]] = {
    "bf16 reduce-scatter": ("reduce-scatter", bf16_ring),
    "fp8 reduce-scatter": ("reduce-scatter", fp8_reduce_scatter),
    "fp8 all-reduce": ("all-reduce", fp8_all_reduce),
    "fp8 all-reduce, two hops": ("two hops", fp8_two_hops),
    "fp8-lm reduce-scatter": (
        "reduce-scatter",
        lambda each: fp8_lm_reduce_scatter(each, settled_mu(each)),
    ),
    "control: sums in fp8": ("reduce-scatter", fp8_ring),
}


def row(method: str, each: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One line of the results: a method over these ranks."""
    kind, function = METHODS[method]
    db, slopes, wrong = {}, {}, []
    for name in TENSORS:
        given = [found[name] for found in each]
        db[name], slopes[name] = quality(function(given), torch.stack(given).double().sum(0))
        wrong += [f"{name}: {words}" for words in failures(kind, len(each), db[name], slopes[name])]
    return {"case": method, "ranks": len(each), "db": db, "slope": slopes, "failures": wrong}


# --- two real ranks ---------------------------------------------------------------------------------------------------------------


def _real(rank: int, store: str, each: list[dict[str, Tensor]], answers: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(each))
    link = Link(dist.group.WORLD)
    reduced = {name: messages.all_reduce(x, link) for name, x in each[rank].items()}
    scattered = {
        name: messages.reduce_scatter(messages.as_rows(x, link.size), link)
        for name, x in each[rank].items()
    }
    answers.put(
        (
            rank,
            {name: x.numpy() for name, x in reduced.items()},
            {name: x.numpy() for name, x in scattered.items()},
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def run_two(each: list[dict[str, Tensor]]) -> bool:
    """Whether two processes get the bits of two threads."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = str(Path(tempfile.mkdtemp()) / "store")
    processes = [
        context.Process(target=_real, args=(rank, store, each, answers)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted((answers.get(timeout=300) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join()
    equal = True
    for name in TENSORS:
        given = [rank[name] for rank in each]
        reduced, scattered = fp8_all_reduce(given), fp8_reduce_scatter(given)
        equal &= all(torch.equal(torch.from_numpy(answer[1][name]), reduced) for answer in found)
        equal &= torch.equal(
            _whole([torch.from_numpy(answer[2][name]) for answer in found], given[0]), scattered
        )
    return equal


def words(found: dict[str, Any]) -> str:
    db, slopes = found["db"].values(), found["slope"].values()
    slope = max(slopes, key=lambda value: abs(value - 1))
    errors = f"{min(db):5.1f} .. {max(db):5.1f} dB  slope {slope:.4f}"
    return (
        f"{found['case']:26} {found['ranks']:3} ranks  {errors}  {len(found['failures'])} failures"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.distributed.gradient_messages", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=64, help="the most; a power of two")
    parser.add_argument(
        "--steps", type=int, default=300, help="of training, before gradients are taken"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--batch",
        type=int,
        default=8,
        help="sequences of 128 bytes of a rank: with more, gradients of ranks are more alike",
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "gradient_messages.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_ranks = gradients(
        options.ranks, hidden=options.hidden, steps=options.steps, batch=options.batch
    )
    setting = {"steps": options.steps, "hidden": options.hidden, "batch": options.batch}
    equal = run_two(all_ranks[:2])
    print(f"two processes (gloo) and two threads give {'the same' if equal else 'DIFFERENT'} bits")
    first = {"case": "two processes equal two threads", "ranks": 2, "equal": equal, **setting}
    record("gradient_messages", [first], options.results)
    for ranks in (2**power for power in range(1, int(math.log2(options.ranks)) + 1)):
        for method in METHODS:
            if method.endswith("two hops") and ranks < 2 * NODE:
                continue
            found = row(method, all_ranks[:ranks])
            print(words(found), flush=True)
            record("gradient_messages", [found | setting], options.results)


if __name__ == "__main__":
    main()
