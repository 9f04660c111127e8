"""HTML reports: one self-contained page per run, per group of runs, or per debugging session."""
