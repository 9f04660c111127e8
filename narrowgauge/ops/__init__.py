"""The operations that carry the library: quantize, mm, hadamard, norm_act, rotary. A folder per op: contract, definition, kernels.

Nothing is imported from here: a function of the same name would hide its folder.
"""
