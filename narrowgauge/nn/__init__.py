"""The low-precision Linear and its parts.

question                                              file
the three GEMMs; gradient of the bias                 linear_function, autograd_rules
what backward needs of x and w, by recipe and device  keep_policy
layout of an operand and its two casts                operands
formats of a recipe                                   narrowgauge.recipes
kernel of a GEMM on a device; emulation               plan; NEEDS in narrowgauge.ops.mm.spec
end of an optimizer step                              step_end
amax histories; amax within a step                    amax_history; ops.quantize.amax_state
cached casts of a weight, writes through .data        weight_cache; all caches: cast_sources
evaluation without gradients: no cache is read        linear
random numbers and their repetition, checkpointing    noise; ops.random
keys of a state dict                                  state_loading
another recipe for one layer or one GEMM              narrowgauge.conversion
"""
