"""The optimizer step in C++ for CPUs."""
