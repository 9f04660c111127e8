"""`narrowgauge export SOURCE --format F --output DIR`: write a model for other software."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def _flag(words: str, negative: str = "") -> Parameter:
    return Parameter(help=words, show_default=False, negative=negative)


def export(
    source: str,
    /,
    *,
    format: Annotated[
        str,
        _flag(
            "bf16, fp8-block, fp8-block-ct, fp8-channel, fp8-static, int8, mxfp8, mxfp4, nvfp4, nvfp4-modelopt, gguf or gguf-bf16."
        ),
    ],
    output: Annotated[Path, _flag("New folder.")],
    recipe: Annotated[str, _flag("Recipe of a folder that is no run.")] = "",
    requantize: Annotated[
        bool, _flag("Cast weights anew where the format cannot hold their codes.")
    ] = False,
    calibrate: Annotated[
        str | None,
        _flag("nvfp4-modelopt: text from which x gets a static scale; own: the run's own data."),
    ] = None,
    unfused: Annotated[
        bool,
        _flag("Not for servers that load q, k, v as one weight: let each go out by itself."),
    ] = False,
    overwrite: Annotated[bool, _flag("Replace an older export in the folder.")] = False,
    load: Annotated[
        bool, _flag("Load the folder by transformers, to check it. [yes]", "--no-load")
    ] = True,
    json: Annotated[bool, _flag("Print export.json.")] = False,
) -> int:
    """Write a trained model as a Hugging Face folder in the codes of its training.

    The codes are those by which the forward pass multiplies, not a quantization after training.
    They are read back and compared with it. A format that does not hold them is refused. vLLM,
    SGLang and transformers read the folder, llama.cpp the file of gguf; docs/export.md lists who
    reads what.

    Parameters
    ----------
    source
        RUN, RUN@STEP, RUN@best, or a folder of a model with --recipe.
    """
    # Imports torch and transformers, which `--help` does without.
    from narrowgauge.train.exporting import Options, exported

    # The flag says what a user gives up, the option what `save` does.
    options = Options(
        format=format,
        output=output,
        recipe=recipe,
        requantize=requantize,
        calibrate=calibrate,
        fused=not unfused,
        overwrite=overwrite,
        load=load,
    )
    report = exported(source, options)
    print(json_format.dumps(dict(report.facts), indent=2) if json else report)
    return 0
