"""`narrowgauge evaluate RUN`: score saved checkpoints with the run's recipe and in 16 bits."""

import json as json_format
from pathlib import Path

from narrowgauge.train.config.settings import TrainConfig


def evaluate(
    run: Path = Path(TrainConfig.output),
    /,
    *,
    tasks: str = "",
    checkpoints: str = "newest",
    dtype: str = "",
    limit: int = 0,
    batch_size: int = 8,
    device: str = "auto",
    trust_task_code: bool = False,
    json: bool = False,
) -> int:
    """Score the checkpoints of a run, with its recipe and in 16 bits.

    Scores are measured on the run's validation data or on tasks of lm-eval.

    Parameters
    ----------
    run
        Folder of the run.
    tasks
        Task files of lm-eval, or names of its tasks, with commas; empty: the run's validation data.
    checkpoints
        newest, all, best, or steps with commas.
    dtype
        bfloat16, float16 or float32; empty: the run's own dtype, and bfloat16 for tasks.
    limit
        Maximum number of examples of each task; 0: all.
    batch_size
        Examples of a task at a time.
    device
        auto, cpu, cuda or cuda:N.
    trust_task_code
        Let task files run Python code: own functions, metrics with other names, free templates.
    json
        Print the result as JSON.
    """
    from narrowgauge.train.evaluation.command import Asked
    from narrowgauge.train.evaluation.command import evaluate as scored

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    result = scored(
        run, Asked(names, checkpoints, dtype, limit, batch_size, device, trust_task_code)
    )
    text = result.pop("text")
    print(json_format.dumps(result, indent=2) if json else text)
    return 0
