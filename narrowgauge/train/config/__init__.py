"""Configuration of a training run: settings, their checks, and the TOML file."""
