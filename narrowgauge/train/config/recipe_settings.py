"""Table `[recipe]`: number formats of the matmuls and around them. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from narrowgauge.train.config.rules import NOT_EMPTY, TABLE, Matching, OneOf, setting

FUSED_SAVES = ("exact", "fp8", "int8")  # values of `save` for fused norms and activations
NO_RECIPE = "none"  # plain nn.Linear in the dtype of `precision`
RECIPE = partial(setting, "recipe")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Table `[recipe]`."""

    # fmt: off
    recipe: str = RECIPE("fp8-current",
        "Number formats of the matrix products of every Linear; auto: the fastest for each, by a measurement; none: as the "
        "precision has them.",
        NOT_EMPTY, key="name", short=True)
    layers_recipe: TABLE = RECIPE(dict,  # noqa: RUF009 (it returns a dataclasses.field)
        "Other recipes for the layers that a pattern names, as 'lm_head=bf16', or some products, as 'layers.1.*=bf16:backward'.",
        key="layers")
    embedding_codes: str = RECIPE("",
        "Rows of embeddings are looked up as such codes, with a learned step (LSQ); empty: as they are.",
        OneOf(("", "int4", "int8")))
    attention: str = RECIPE("",
        "Q @ K.T and P @ V of attention in FP8 (E4M3), forward only, slower without a kernel for it; empty: as the precision has them.",
        OneOf(("", "fp8")))
    switch: str = RECIPE("", "Wider recipes later in the run, as 'fp8-current@80%' or 'layers.0.*=bf16@240:forward'.")
    precision: str = RECIPE("amp-bf16", "Numbers outside the recipe.",
        OneOf(("fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3")))
    keep_float32: str = RECIPE("",
        "What keeps float32 weights and arithmetic in a 16-bit model, as norms,softmax,embeddings,lm_head; empty: as the precision has it.",
        Matching(r"|[^,\s]+( ?, ?[^,\s]+)*", "names with commas, as 'norms,softmax'"))
    fuse: bool = RECIPE(False, "Norms and activations cast what they compute for the Linears that read it.")
    save: str = RECIPE("",
        "What is kept for backward. By a Linear: original or quantized; empty: as the recipe says. By fused norms and activations "
        "(fuse): exact, or fp8 or int8 with gradients that are near.",
        OneOf(("", "original", "quantized", *FUSED_SAVES)))
    # fmt: on
