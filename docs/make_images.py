"""The pictures of docs/monitoring.md: ``python docs/make_images.py runs/quickstart/logs`` makes them anew.

It needs Chromium with its driver, and the packages of the tests.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from browser import CARDS, browser, tensorboard  # noqa: E402

# Page -> height of the window, and what is true when it has been drawn.
PAGES = {
    "custom_scalars": (1240, f"{CARDS}.length == 9 && {CARDS}.every(c => Object.keys(c._nameToDataSeries).length)"),
    "text": (900, "find(document, 'table').length"),
    "images": (780, "find(document, 'img').length && find(document, 'img').every(image => image.naturalWidth)"),
}
COLOURS = 128
ENLARGE = "find(document, 'tf-image-loader').forEach(card => card.actualSize = true)"


def make_images(logs: Path) -> None:
    """Take a picture of each page of the TensorBoard of these logs."""
    (DOCS / "images").mkdir(exist_ok=True)
    with tensorboard(logs) as address, tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as opened:
        for page, (height, drawn) in PAGES.items():
            opened.driver.set_window_size(1920, height)
            opened.open(f"{address}#{page}")
            opened.wait_for(drawn)
            opened.ask(ENLARGE)
            opened.wait_until_still()
            file = DOCS / "images" / f"{page}.png"
            opened.save(file)
            Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    make_images(Path(sys.argv[1]))
