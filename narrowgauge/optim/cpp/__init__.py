"""Optimizer step in C++ for CPUs."""
