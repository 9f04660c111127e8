"""Counts launches, bytes, copies, waits and registers of training steps without a GPU, over an empty CUDA runtime.

Real torch (CUDA build) and real Triton run on a card that does not exist: kernels are compiled for sm_90, each launch, product, copy,
wait and allocation is written down, and nothing is computed. docs/gpu.md says how to use it and how exact it is.

    stand_in/       libcudart, libcublas, libcublasLt, libcuda and libnvidia-ml in C: they log, and succeed
    inside/         sitecustomize.py of a process over the runtime
    hooks           what is changed in torch, Triton and narrowgauge there
    runtime         builds the stand-ins, starts a process over them
    log, accesses, operator_bytes, binaries   what is read off the log, the Triton IR, torch's operators and the binaries
    linear, layer, optimizer, trainer   what is counted; tally: the numbers of a case
    counts          the committed numbers, counts/torch-X.Y.json, and what rose
    checks          of the runtime itself, run over it
"""
