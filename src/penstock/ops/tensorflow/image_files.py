"""Images in files, which Pillow decodes: JPEG, PNG, BMP and GIF."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import extra_needed
from penstock.core.types import ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import encoded, operator, texts

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_UINT8 = np.dtype(np.uint8)
_FORMATS = ("JPEG", "PNG", "BMP", "GIF")  # any of which each operation decodes
# Places of bytes: in a PNG file the bits of a channel and the type of colors, in a BMP file the
# bits of a pixel.
_DEPTH, _COLORS, _BITS = 24, 25, 28
_GRAY_WITH_OPACITY = 4
_GRAY = (9797, 19234, 3737)  # libpng's weights of red, green and blue, in 32768ths


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    channels = attrs.get("channels", 0) or None
    dtype = common.named_dtype(attrs, "dtype", "uint8")
    # Files of several pictures have one more axis.
    fixed = not attrs.get("expand_animations", False)
    return (TensorType(dtype, (None, None, channels) if fixed else None),)


def _infer_gif(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(_UINT8, (None, None, None, 3)),)


@operator("DecodeJpeg", infer=_infer)
@operator("DecodePng", infer=_infer)
@operator("DecodeBmp", infer=_infer)
@operator("DecodeGif", infer=_infer_gif)
@operator("DecodeImage", infer=_infer)
def decode_image(node: Node, types: Types) -> Kernel:
    """The pixels [height, width, channels] of a file, or [pictures, height, width, channels] of a
    GIF. Channels are those of the file if the attribute is 0."""
    name, attrs = node.op.name, node.attrs
    with extra_needed(f"{name} needs Pillow", "image"):
        from PIL import Image
    channels, ratio = attrs.get("channels", 0), attrs.get("ratio", 1)
    several = name == "DecodeGif" or (name == "DecodeImage" and attrs["expand_animations"])
    dtype = common.named_dtype(attrs, "dtype", "uint8")

    def decode(contents: np.ndarray) -> np.ndarray:
        if contents.ndim:
            raise ShapeError(
                f"the contents of one file are a scalar, not of shape {contents.shape}"
            )
        data = encoded(*texts(contents))
        try:
            with Image.open(BytesIO(data), formats=tuple(_FORMATS)) as image:
                reserve(4 * image.size[0] * image.size[1])
                pixels = _pixels(image, data, channels, ratio, several)
                form = image.format
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ShapeError(f"the contents cannot be decoded: {error}") from error
        if dtype.kind != "f":
            return pixels
        if form != "PNG":
            return pixels * np.float32(1 / 255)
        if data[_DEPTH] > 8:
            raise ShapeError("a PNG file of 16 bits cannot be decoded to float32, only to uint8")
        return (pixels * np.float32(257)) * np.float32(1 / 65535)

    return Kernel(decode)


def _pixels(image: Picture, data: bytes, channels: int, ratio: int, several: bool) -> np.ndarray:
    form = image.format
    if form == "GIF":
        if channels not in (0, 3):
            raise ShapeError(f"pictures of a GIF have 3 channels, not {channels}")
        frames = []
        for index in range(getattr(image, "n_frames", 1) if several else 1):
            image.seek(index)
            reserve(4 * image.size[0] * image.size[1])
            frames.append(np.array(image.convert("RGB")))
        return np.stack(frames) if several else frames[0]
    if form == "PNG":
        return _pixels_of_png(image, data, channels)
    if form == "BMP" and data[_BITS] not in (8, 24):
        raise ShapeError(f"BMP files of {data[_BITS]} bits are not supported; write one of 24 bits")
    if form == "JPEG":
        size = tuple([-(-n // ratio) for n in image.size])
        image.draft("L" if channels == 1 else None, tuple([max(n // ratio, 1) for n in image.size]))  # type: ignore[arg-type]
        if image.size != size:
            raise ShapeError(f"an image of {image.size} is too small for a ratio of {ratio}")
    own = {"L": 1, "RGB": 3}.get(image.mode)
    if own is None:
        raise ShapeError(f"an image of mode {image.mode} is not supported; convert the file to RGB")
    if channels not in (0, own) and (own, channels) != (1, 3):
        raise ShapeError(f"a {form} file of {own} channels cannot be decoded to {channels}")
    pixels = np.array(image).reshape(image.size[1], image.size[0], own)
    return pixels if channels in (0, own) else pixels.repeat(3, 2)


def _pixels_of_png(image: Picture, data: bytes, channels: int) -> np.ndarray:
    """Repeat gray for colors, and weight colors for gray; drop or add opacity."""
    marked = image.info.get("transparency") if image.mode in ("L", "RGB") else None
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    pixels = np.array(image).reshape(image.size[1], image.size[0], -1)
    if image.mode == "1":
        pixels = pixels * np.uint8(255)
    elif image.mode.startswith("I;16"):  # whose lower bytes are dropped
        pixels = (pixels >> 8).astype(np.uint8)
    elif data[_COLORS] == _GRAY_WITH_OPACITY and image.mode == "RGBA":
        pixels = pixels[..., [0, 3]]
    own = pixels.shape[2]
    if channels in (0, own):
        return pixels
    deep = data[_DEPTH] > 8
    if deep and (marked is not None or (channels == 1 and own > 2)):
        raise ShapeError(f"a PNG file of 16 bits cannot be decoded to {channels} channels")
    # The opacity that TensorFlow adds has the bits of the file.
    added = np.full_like(pixels[..., :1], 255 if deep else 2 ** data[_DEPTH] - 1)
    opacity = pixels[..., own - 1 :] if own in (2, 4) else added
    if marked is not None:
        opacity = np.where((pixels == marked).all(2, keepdims=True), 0, 255)
    colors = pixels[..., : 3 if own > 2 else 1]
    if channels == 1 and own > 2:
        gray = (colors.astype(np.int32) * np.array(_GRAY)).sum(2, keepdims=True) >> 15
        colors = gray.astype(np.uint8)
    if channels > 2 and own < 3:
        colors = colors.repeat(3, 2)
    return np.concatenate([colors, opacity], 2).astype(np.uint8) if channels == 4 else colors
