"""Measurements: one harness, one file per question, results as JSON lines. See README.md in this folder."""
