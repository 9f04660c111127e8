"""What torchrun's agent does, without torch: starts ranks, passes on their end. python agent.py PORT FIRST COUNT WORLD FAULT RANK"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    port, first, count, world, *fault = sys.argv[1:]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": world,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
    }
    ranks = []
    for local in range(int(count)):
        own = {**os.environ, **shared, "RANK": str(int(first) + local), "LOCAL_RANK": str(local)}
        ranks.append(
            subprocess.Popen([sys.executable, Path(__file__).with_name("rank.py"), *fault], env=own)
        )
    for each in ranks:
        each.wait()
    print("codes", *(each.returncode for each in ranks), flush=True)
