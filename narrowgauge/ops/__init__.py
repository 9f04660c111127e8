"""Operators: quantize, mm, grouped, attention, hadamard, norm_act and rotary.

Each operator is a folder with its contract, its definition in plain torch, and its kernels. This
module imports nothing, because a function of the same name would hide the folder.
"""
