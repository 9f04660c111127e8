"""Runs pytest in forks of one process that has imported torch and transformers, which takes most of a short run.

Started by `benchmarks.mutations` as a script. Each line of standard input is a JSON object: `tree`,
`arguments` of pytest, the file `output`, and `limit_s`. Each answer is a line with the exit code,
or "hung". Nothing of a tree is imported before the fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import pytest
import scipy.stats  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401


def child(job: dict[str, Any]) -> int:
    """Runs pytest as a process of its own, in its own session."""
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(job["tree"])
    os.environ["PYTHONPATH"] = sys.path[0] = job["tree"]  # instead of this file's folder
    code = int(pytest.main(job["arguments"]))
    sys.stdout.flush()
    return code


def exit_code(pid: int, limit_s: float) -> int | None:
    """The exit code of a child, or None if it had to be killed."""
    ends_at_s = time.monotonic() + limit_s
    while time.monotonic() < ends_at_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 3  # pytest's own for an internal error
            try:
                code = child(job)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = exit_code(pid, job["limit_s"])
        print("hung" if code is None else code, flush=True)


if __name__ == "__main__":
    main()
