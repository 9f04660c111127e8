"""Looking at a run: what its numbers did (`statistics`), against what (`compare`), and a page that tells it (`report`).

`statistics` needs torch and is called while training; `runs`, `recorded` and `compare` need Python alone; `report` needs
jinja2, matplotlib, and torch for the ranges of formats. Nothing is imported from here, so that each costs only what it needs.
"""
