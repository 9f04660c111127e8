"""Draws the README's pictures of a report with Chromium.

python docs/images/make.py runs/mine [options of chromium, such as --no-sandbox for root]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

TOP = "main { padding-top: 16px } "
# Name -> height in pixels, and what hides the rest of the page.
PICTURES = {
    "report": (1430, TOP),
    "tensors": (
        950,
        TOP + "main > :not(:has(figure.tensor)) { display: none } h2 { margin-top: 0 }",
    ),
}

page = Path(sys.argv[1], "report.html").read_text(encoding="utf-8")
with tempfile.TemporaryDirectory() as folder:
    shown = Path(folder, "page.html")
    for name, (height, style) in PICTURES.items():
        picture = Path(__file__).with_name(f"{name}.png")
        shown.write_text(
            page.replace("</head>", f"<style>{style}</style></head>"), encoding="utf-8"
        )
        options = [
            "--headless",
            "--hide-scrollbars",
            f"--window-size=1050,{height}",
            f"--screenshot={picture}",
        ]
        subprocess.run(["chromium", *options, *sys.argv[2:], shown.as_uri()], check=True)
        Image.open(picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
            picture, optimize=True
        )
