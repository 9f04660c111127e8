"""The configuration of a run: settings, their checks, and the file they come from."""
