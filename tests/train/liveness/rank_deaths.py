"""Is every rank that is killed, stopped, hung or left by its agent named, and does none train on as an orphan?

    python -m tests.train.liveness.rank_deaths --faults 60
    python -m tests.train.liveness.rank_deaths --faults 10 --torchrun

A tiny Llama trains on two or three ranks, on one node or two (an agent each, on this machine). One fault
comes at a random moment, on a random rank:

    kill    SIGKILL          stop   SIGSTOP            loop   `while True: pass`
    exit    sys.exit(3)      raise  RuntimeError       agent  SIGKILL to the agent of the rank's node

A row has the seconds from the fault to the line that names the rank (or torchrun), the seconds until the
last rank and sentinel had ended, and the processes that were alive 15 s after the fault; of ranks that
stop or hang, which the run waits for, 15 s after --parallel.timeout-s (20 s there, 600 s elsewhere).

Without --torchrun an agent of the benchmark forks ranks with their imports made, hosts the store and
ends the other ranks by SIGTERM once one has failed, and by SIGKILL after 30 s, as torchrun does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import RESULTS, ROOT, record
from narrowgauge import cli, storage
from narrowgauge.manifest import STEP
from narrowgauge.train import one_run
from narrowgauge.train.liveness import processes
from narrowgauge.train.liveness.sentinel import WAIT_S
from narrowgauge.train.parallel import checkpoints
from narrowgauge.train.parallel import ranks as ranks_module
from narrowgauge.train.passes import Passes
from narrowgauge.train.trainer import Trainer
from narrowgauge.train.validation import Validation
from tests.train.checkpoint.checkpoint_kills import PRELOADED
from tests.train.checkpoint.train_kills import SETTINGS, _corrupt, write_text

KINDS = ("kill", "kill", "kill", "stop", "loop", "exit", "raise", "agent", "agent")
# Name -> the function before whose call the fault comes; "any": at any time, from outside.
MOMENTS = {
    "store": (ranks_module, "_met"),
    "group": (dist, "init_process_group"),
    "build": (Trainer, "__init__"),
    "step": (Trainer, "_optimizer_step"),
    "gradient": (Passes, "gradient"),
    "checkpoint": (checkpoints, "save"),
    "evaluation": (Validation, "evaluate"),
    "end": (one_run, "trained_weights"),
}
LAYOUTS = {2: ("dp", "fsdp", "tp=2", "pp=2"), 3: ("dp", "fsdp")}
STEPS, EVERY = 40, 10
OWN = ("--training.steps", "--evaluation.every", "--batch.size")  # that a trial chooses
ORPHAN_S, HANG_TIMEOUT_S, BEGIN_S, AGENT_KILL_S = 15.0, 20.0, 240.0, 30.0


def apply(kind: str, mark: Path) -> None:
    mark.write_text(str(time.time()), encoding="utf-8")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "agent":
        os.kill(int(mark.with_name("agent").read_text("utf-8")), signal.SIGKILL)
    elif kind == "exit":
        sys.exit(3)
    elif kind == "raise":
        raise RuntimeError("the fault of this trial")
    while kind == "loop":
        pass


def install(fault: dict[str, Any], place: Path) -> None:
    owner, name = MOMENTS[fault["moment"]]
    real, calls = getattr(owner, name), [0]

    def faulty(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == fault["call"]:
            apply(fault["kind"], place / "mark")
        return real(*given, **named)

    setattr(owner, name, faulty)


def variables(fault: dict[str, Any], port: int, rank: int, local: int) -> dict[str, str]:
    found = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(fault["world"]),
    }
    found |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    return found | {"TORCHELASTIC_RUN_ID": "trial", "RANK": str(rank), "LOCAL_RANK": str(local)}


def _agent(
    fault: dict[str, Any],
    place: Path,
    arguments: list[str],
    port: int,
    node: int,
    members: list[int],
) -> None:
    """Forks the ranks of a node and waits for them."""
    if fault["rank"] in members:
        (place / "agent").write_text(str(os.getpid()), encoding="utf-8")
    running = {}
    for local, rank in enumerate(members):
        pid = os.fork()
        if pid == 0:
            _rank(fault, place, arguments, variables(fault, port, rank, local))
        running[pid] = rank
        (place / f"pid-{rank}").write_text(str(pid), encoding="utf-8")
    serves = node == 0
    store = None
    if serves:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    failed_s = 0.0
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            code = os.waitstatus_to_exitcode(status)
            (place / f"code-{running.pop(pid)}").write_text(str(code), encoding="utf-8")
            if code and not failed_s:
                failed_s = time.monotonic()
                for other in running:
                    os.kill(other, signal.SIGTERM)
        if failed_s and time.monotonic() - failed_s > AGENT_KILL_S:
            for other in running:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.1)
    done = [place / f"done-{each}" for each in range(fault["nodes"])]
    done[node].touch()
    until_s = time.monotonic() + 300
    while (
        store is not None and not all(each.exists() for each in done) and time.monotonic() < until_s
    ):
        time.sleep(0.1)  # torchrun's agents leave together


def _rank(
    fault: dict[str, Any], place: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    code = 1
    try:
        os.environ.update(environment)
        said = os.open(place / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = sys.stderr = open(said, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
        if int(environment["RANK"]) == fault["rank"] and fault["moment"] in MOMENTS:
            install(fault, place)
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def chosen(rng: random.Random, torchrun: bool) -> dict[str, Any]:
    world = 2 if torchrun else rng.choice((2, 2, 2, 3))
    kind = rng.choice(KINDS)
    moments = list(MOMENTS) + (["any", "any"] if kind in ("kill", "stop", "agent") else [])
    moments += ["import", "import"] if torchrun else []
    moment = rng.choice(moments)
    counts = {
        "step": STEPS - 2,
        "gradient": STEPS - 2,
        "checkpoint": STEPS // EVERY,
        "evaluation": STEPS // EVERY - 1,
    }
    return {
        "kind": kind,
        "moment": moment,
        "call": rng.randint(1, counts.get(moment, 1)),
        "after_s": rng.uniform(0, 6),
        "world": world,
        "rank": rng.randrange(world),
        "parallel": rng.choice(LAYOUTS[world]),
        "nodes": 1 if torchrun else rng.choice((1, 1, 2)),
        "launcher": "torchrun" if torchrun else "forked",
    }


def trial(fault: dict[str, Any], place: Path, text: Path) -> dict[str, Any]:
    hangs = fault["kind"] in ("stop", "loop")
    if fault["parallel"] == "pp=2" and fault["moment"] == "gradient":
        fault["moment"] = "step"  # a pipeline's step is one call
    timeout_s = HANG_TIMEOUT_S if hangs else 600.0
    output = place / "run"
    common = [each for each in SETTINGS if each.partition("=")[0] not in OWN]
    arguments = [
        "train",
        *common,
        f"--data={text}",
        f"--data.cache={text.parent / 'cache'}",
        f"--output={output}",
    ]
    arguments += [
        f"--training.steps={STEPS}",
        f"--evaluation.every={EVERY}",
        f"--checkpoint.every={EVERY}",
        "--batch.micro-batches=2",
    ]
    arguments += [
        f"--parallel={fault['parallel']}",
        f"--parallel.timeout-s={timeout_s:g}",
        f"--batch.size={4 * fault['world']}",
    ]
    begun = (
        _by_torchrun(fault, place, arguments)
        if fault["launcher"] == "torchrun"
        else _forked(fault, place, arguments)
    )
    mark, said = place / "mark", place / "said"
    until_s = time.time() + BEGIN_S
    if fault["moment"] == "any":
        _wait(lambda: said.exists() and said.stat().st_size > 0, until_s)
        time.sleep(fault["after_s"])
        victim = int(
            (place / ("agent" if fault["kind"] == "agent" else f"pid-{fault['rank']}")).read_text(
                "utf-8"
            )
        )
        if not processes.exists(victim):
            begun(True)
            return fault | {"missed": True}
        mark.write_text(str(time.time()), encoding="utf-8")
        os.kill(victim, signal.SIGSTOP if fault["kind"] == "stop" else signal.SIGKILL)
    ended = [place / f"code-{rank}" for rank in range(fault["world"])]
    _wait(
        lambda: (
            (mark.exists() and mark.read_text("utf-8") != "")
            or all(each.exists() for each in ended)
        ),
        until_s,
    )
    if not mark.exists():
        begun(True)
        return fault | {
            "missed": True,
            "said": said.read_text("utf-8", "replace")[-2000:] if said.exists() else "",
        }
    at_s, load = float(mark.read_text("utf-8")), os.getloadavg()[0]
    who = r"(torchrun|the store)" if fault["kind"] == "agent" else rf"rank {fault['rank']}\b"
    named = re.compile(
        rf"^(narrowgauge: |WARNING: |Note: |.*raised on ).*{who}|^narrowgauge: .*{who}",
        re.MULTILINE,
    )
    # Of a rank that hangs the time-out begins once another has waited for it for WAIT_S.
    limit_s = at_s + ORPHAN_S + (timeout_s + 2 * WAIT_S if hangs else 0)
    named_s = ended_s = None
    while time.time() < limit_s and (named_s is None or ended_s is None):
        text_now = said.read_text("utf-8", "replace") if said.exists() else ""
        if named_s is None and named.search(text_now):
            named_s = round(time.time() - at_s, 2)
        if ended_s is None and not alive(place):
            ended_s = round(time.time() - at_s, 2)
        time.sleep(0.05)
    text_now = said.read_text("utf-8", "replace") if said.exists() else ""
    if named_s is None and (found := named.search(text_now)):
        named_s = round(time.time() - at_s, 2) if found else None
    orphans = alive(place)
    time.sleep(0.3)  # for the agent's next look
    begun(True)
    codes = {path.name[5:]: int(path.read_text("utf-8")) for path in sorted(place.glob("code-*"))}
    told = [line for line in text_now.splitlines() if line.startswith("narrowgauge: ")]
    damaged = []
    if (output / "checkpoints").exists():
        storage.recover(output / "checkpoints", STEP.pattern)
        damaged = _corrupt(output / "checkpoints")
    row = {
        "named_s": named_s,
        "ended_s": ended_s,
        "orphans": len(orphans),
        "codes": codes,
        "lines": len(told),
        "load": load,
    }
    row |= {"corrupt": damaged, "words": (named.search(text_now) or [""])[0][:300]}
    if named_s is None or orphans:
        row |= {"said": text_now[-3000:], "left": orphans}
    return fault | row


def _wait(is_so: Any, until_s: float) -> None:
    while time.time() < until_s and not is_so():
        time.sleep(0.05)


def alive(place: Path) -> list[str]:
    """Ranks and sentinels of a trial that are not stopped for good: whatever still exists."""
    pids = {path.read_text("utf-8").strip() for path in place.glob("pid-*")} - {""}
    found = [f"rank {pid}" for pid in pids if processes.exists(int(pid))]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode("utf-8", "replace")
            if "liveness.sentinel" in words and any(f'"pid": {pid},' in words for pid in pids):
                found.append(f"sentinel {path.parent.name}")
    return found


def _forked(fault: dict[str, Any], place: Path, arguments: list[str]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*PRELOADED, "narrowgauge.train.loop", "transformers.models.llama.modeling_llama"]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cut = fault["world"] if fault["nodes"] == 1 else fault["world"] - 1
    nodes = [list(range(cut)), list(range(cut, fault["world"]))][: fault["nodes"]]
    agents = []
    for number, members in enumerate(nodes):
        agent = context.Process(
            target=_agent, args=(fault, place, arguments, port, number, members)
        )
        agent.start()
        agents.append(agent)

    def end(_: bool) -> None:
        for agent in agents:
            agent.kill()
            agent.join()
        _kill_left(place)

    return end


def _by_torchrun(fault: dict[str, Any], place: Path, arguments: list[str]) -> Any:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(fault["world"]),
    ]
    program = [
        "-m",
        "tests.train.liveness.rank_deaths",
        "--as-rank",
        json.dumps(fault),
        str(place),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(place / "said", "ab") as said:
        agent = subprocess.Popen([*launch, *program], env=environment, stdout=said, stderr=said)
    (place / "agent").write_text(str(agent.pid), encoding="utf-8")

    def end(_: bool) -> None:
        agent.kill()
        agent.wait()
        _kill_left(place)

    return end


def _kill_left(place: Path) -> None:
    for words in alive(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(words.split()[1]), signal.SIGKILL)


def as_rank(fault: dict[str, Any], place: Path, arguments: list[str]) -> int:
    """A rank of torchrun."""
    (place / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")
    if int(os.environ["RANK"]) == fault["rank"] and fault["moment"] in MOMENTS:
        install(fault, place)
    if int(os.environ["RANK"]) == fault["rank"] and fault["moment"] == "import":
        import narrowgauge.cli.train as verb

        def faulty(settings: Any) -> None:  # where torch is imported in a real start
            apply(fault["kind"], place / "mark")

        vars(verb)["refuse_unknown_recipes"] = faulty
    return cli.main(arguments)


def rounds(place: Path, count: int, seed: int, torchrun: bool) -> Iterator[dict[str, Any]]:
    rng, text = random.Random(seed), place / "text"
    write_text(text)
    for number in range(count):
        folder = place / f"trial-{number}"
        folder.mkdir()
        yield trial(chosen(rng, torchrun), folder, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true")
    given = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as place:
        for row in rounds(Path(place), given.faults, given.seed, given.torchrun):
            done.append(row)
            print(len(done), row, flush=True)
            record("rank-deaths", [row], RESULTS / "rank_deaths.jsonl")
    hit = [row for row in done if not row.get("missed")]
    names = [row["named_s"] for row in hit]
    late = [row for row in hit if row["named_s"] is None or row["named_s"] > 10]
    orphans, damaged = sum(row["orphans"] for row in hit), sum(bool(row["corrupt"]) for row in hit)
    print(
        f"{len(hit)} faults of {len(done)}: not named within 10 s {len(late)}, orphans {orphans}, corrupt {damaged}"
    )
    print(f"slowest name {max(filter(None, names), default=None)} s")
    sys.exit(bool(late or orphans or damaged or not hit))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        sys.exit(as_rank(json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    main()
