"""Text in images: one network finds its lines, another reads them.

``python examples/ocr.py DETECTOR.onnx READER.onnx IMAGE`` prints a line of text for each that it
finds, with its place in pixels. The networks are those of PaddleOCR, as rapidocr's package has them
(``pip download rapidocr==3.10.0``, Apache-2.0: ``PP-OCRv6_det_small.onnx``,
``PP-OCRv6_rec_small.onnx``). What stands around them is written here: scaling, the regions of the
detector's map, and the rule by which the reader's steps become letters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import penstock

HEIGHT = 48  # of the lines that the reader takes, in pixels
LIKELY, SURE = 0.3, 0.6  # of a pixel to be text, and of a region on average
GROWN = (
    1.6  # the detector marks the core of a line: its area times this, by its perimeter, is missing
)


@dataclass(frozen=True)
class Line:
    """A line of text, its place (left, top, right, bottom), and how sure the reader is (0 to 1)."""

    text: str
    box: tuple[int, int, int, int]
    score: float


def planes(image: Image.Image) -> np.ndarray:
    """float32[1, 3, height, width] from -1 to 1, blue first."""
    pixels = np.asarray(image.convert("RGB"), np.float32)[..., ::-1] / 127.5 - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis])


def regions(mask: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """The rectangles around the connected parts of a mask, in its rows and columns."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:  # each part takes the largest of its labels, which spreads by rows and columns
        spread = np.pad(labels, 1)
        around = [spread[:-2, 1:-1], spread[2:, 1:-1], spread[1:-1, :-2], spread[1:-1, 2:]]
        larger = np.where(mask, np.maximum.reduce([labels, *around]), 0)
        if (larger == labels).all():
            break
        labels = larger
    for label in np.unique(labels[labels > 0]):
        rows, columns = np.nonzero(labels == label)
        yield slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)


class Reader:
    """Both networks, ready to run."""

    def __init__(self, detector: str | Path, reader: str | Path) -> None:
        self.detector, self.reader = penstock.compile(detector), penstock.compile(reader)
        # The reader's classes: none, those that the file lists, and the space.
        self.letters = ["", *self.reader.model.metadata["character"].split("\n"), " "]

    def boxes(self, image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
        """Where text is, from top to bottom."""
        width, height = (max(32, round(side / 32) * 32) for side in image.size)
        likely = self.detector(planes(image.resize((width, height))))[0, 0]
        across, down = image.width / width, image.height / height
        for rows, columns in regions(likely > LIKELY):
            tall, wide = rows.stop - rows.start, columns.stop - columns.start
            if min(tall, wide) < 3 or likely[rows, columns].mean() < SURE:
                continue
            margin = tall * wide * GROWN / (2 * (tall + wide))
            left, right = max(0, columns.start - margin), min(width, columns.stop + margin)
            top, bottom = max(0, rows.start - margin), min(height, rows.stop + margin)
            yield (
                round(left * across),
                round(top * down),
                round(right * across),
                round(bottom * down),
            )

    def read(self, image: Image.Image) -> list[Line]:
        """All lines of an image."""
        return [self.line(image, box) for box in sorted(self.boxes(image), key=lambda box: box[1])]

    def line(self, image: Image.Image, box: tuple[int, int, int, int]) -> Line:
        """One line. Widths are rounded up, so that a few plans serve all of them."""
        crop = image.crop(box)
        wide = round(HEIGHT * crop.width / crop.height)
        canvas = np.zeros((1, 3, HEIGHT, -(-wide // 160) * 160), np.float32)
        canvas[..., :wide] = planes(crop.resize((wide, HEIGHT)))
        steps = self.reader(canvas)[0]
        best = steps.argmax(axis=1)
        # A letter is written once for all steps in a row that see it.
        kept = (best > 0) & (best != np.concatenate([[0], best[:-1]]))
        score = float(steps.max(axis=1)[kept].mean()) if kept.any() else 0.0
        return Line("".join(self.letters[i] for i in best[kept]), box, score)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 3:
        sys.exit("usage: python examples/ocr.py DETECTOR.onnx READER.onnx IMAGE")
    detector, reader, path = arguments
    for line in Reader(detector, reader).read(Image.open(path)):
        print(f"{line.text}  {line.box}  {line.score:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
