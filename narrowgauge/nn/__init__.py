"""The low-precision Linear and its parts: an index of questions, each with the file that answers it.

One forward and backward pass
    what a user touches: `linear`, `QLinear`                      linear; errors: linear_refusals
    the three GEMMs; gradient of the bias                         linear_function, autograd_rules
    what one call asks for: plan, output type, ranks, observer    linear_context
    kernels of a recipe on a device; emulation                    plan; NEEDS in ops.mm.spec
    layout of an operand and its two casts                        operands
    backward reads the codes of forward (INT4)                    straight_through
    backward casts decoded codes of forward (quartet2)            recast_codes
    what backward saves of x, w and gy, by recipe and device      keep_policy
    random numbers and their repetition, checkpointing            noise; ops.random
    rotation of a GEMM's operands                                 rotation; on a GPU rotated_pieces
    rows that a product samples or drops                          leverage_score
    projections of nn.MultiheadAttention                          attention
    attention whose two products multiply E4M3                    fp8_attention
    attention in 16 bits by a kernel of its own                   attention16
    Conv1D, and Linears with a forward of their own               disguised
    convolutions whose kernels do not overlap                     patches
    DTensors; torch's own forward, with the recipe suspended      sharded; suspended_linear
    what a suspended pass leaves alone: histories and caches      converted_model
    torch.fx, functorch, forward-mode AD                          transforms

Casts that are made once and read often
    who may have made a cast already; when q, k and v share one   cast_sources
    casts of a weight within a step, writes through .data         weight_cache

What a recipe adds to a layer
    attributes; what copy, deepcopy and pickle take along         converted_state, linear_state
    keys of a state dict; loading without them                    state_loading
    amax histories; amax within a step                            amax_history, ops.quantize.amax_state
    learned steps                                                 learned_step
    weights that need no gradient (requires_grad=False)           linear_function
    a weight stored as codes; its Parameter when it is read       frozen; coded_weight
    an embedding as codes                                         embedding
    formats of a recipe; the named recipes                        narrowgauge.recipe; narrowgauge.recipes
    another recipe for one layer or one GEMM                      narrowgauge.conversion

Mixtures of experts
    products of experts in one parameter; rows sorted by expert   grouped_linear
    all experts of a stack in one launch on a GPU                 grouped_function, ops.grouped
    whose experts can be converted; their forward pass            experts
    experts stored as codes                                       frozen_experts

A whole model, and its training loop
    advance, suspended, non-finite amaxes                         converted_model
    end of an optimizer step; steps that a GradScaler skips       step_end
    loops that misuse a layer: no step ends                       step_watch, step_warnings
    a weight that is multiplied without its layer                 bypassed_weights
    a copy of the model without recipes                           unconverted_copies
    who observes operands and results                             observer
    what guard and blame need of a layer, ours or another's       narrow_layer
    modules of torchao, TransformerEngine and bitsandbytes        foreign_modules, foreign_linear
    GEMMs that another library calls                              gemm_calls
    what keeps float32 in a 16-bit model, and by which list       float32_modules
    dropout on a CPU                                              dropout
"""
