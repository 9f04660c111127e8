"""Questions about a run, and about a card: guard, blame, ladder, study, branch, spike watch, report.

    guard      does the recipe still follow BF16 from the run's own state?
    blame      which matmul computes inaccurately?
    debug      which change of the recipe closes a gap? (`ladder`)
    study      is a recipe worse than another, over seeds?
    branch     how does the run continue under other numerics?
    card       what does this GPU compute, how fast, and what does it refuse? (`card-report`)
    spikes     does a loss spike come from the data or from the number format? (`spike_watch`)

The lab imports `train`, and `train` never imports the lab: a run gets its guard, its spike watch
and its branch through `loop.Extensions` (`lab.training`). `narrowgauge.diagnose` has what both
need: readers of run folders, statistics, and the `Verdict`.

Nothing is imported here.
"""
