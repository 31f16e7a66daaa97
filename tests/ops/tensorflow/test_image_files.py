"""Images in files."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from tests.support.tf_operations import CASES, operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.image_files"
)


def decoded(data: bytes, like: str, change: Callable[[Any], None] = lambda attrs: None) -> Any:
    """The answer of a recorded graph, with changed attributes, for another file."""
    graph = GraphDef.FromString(CASES.graph(like))
    change(next(node.attr for node in graph.node if node.op.startswith("Decode")))
    (name,), (out,) = CASES.part(like, "in"), CASES.part(like, "out")
    text = np.array(data.decode("utf-8", "surrogateescape"), object)
    return ps.compile(graph.SerializeToString()).run({name: text}, [out])[out]


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture() -> Image.Image:
    y, x = np.mgrid[:13, :17]
    return Image.fromarray(np.stack([9 * x, 11 * y, 5 * (x + y)], 2).astype(np.uint8))


def test_jpeg_by_default_is_that_of_the_accurate_method() -> None:
    """TensorFlow's default is a faster method, at most 10 codes apart; it calls the attribute a hint."""
    want = CASES.part("DecodeJpeg_rgb_0", "out")
    text = next(iter(CASES.part("DecodeJpeg_rgb_0", "in").values())).item()
    data = text.encode("utf-8", "surrogateescape")
    got = decoded(data, "DecodeJpeg_rgb_0", lambda attrs: attrs.pop("dct_method"))
    np.testing.assert_array_equal(got, next(iter(want.values())))


def test_png_of_a_palette_or_of_bits_has_colors() -> None:
    few = picture().quantize(4)
    want = np.array(few.convert("RGB"))
    np.testing.assert_array_equal(decoded(written(few, "PNG"), "DecodePng_3_0"), want)
    # TensorFlow states an opacity of all bits of the file.
    opaque = decoded(written(few, "PNG", bits=2), "DecodePng_3_4")
    np.testing.assert_array_equal(
        opaque, np.pad(want, ((0, 0),) * 2 + ((0, 1),), constant_values=3)
    )
    gray = picture().convert("1")
    got = decoded(written(gray, "PNG"), "DecodePng_3_0")
    np.testing.assert_array_equal(got[..., 0], np.array(gray) * np.uint8(255))


def test_png_of_a_transparent_color_has_opacity() -> None:
    gray = picture().convert("L")
    mark = int(np.array(gray)[3, 4])
    got = decoded(written(gray, "PNG", transparency=mark), "DecodePng_1_4")
    np.testing.assert_array_equal(got[..., 3] == 0, np.array(gray) == mark)


def test_pictures_of_a_gif_are_stacked_unless_one_is_wanted() -> None:
    pictures = [picture().quantize(200), picture().rotate(180).quantize(200)]
    data = written(pictures[0], "GIF", save_all=True, append_images=pictures[1:])

    def expand(attrs: Any) -> None:
        attrs["expand_animations"].b = True

    want = [np.array(x.convert("RGB")) for x in pictures]
    np.testing.assert_array_equal(decoded(data, "DecodeImage_jpeg"), want[0])
    np.testing.assert_array_equal(decoded(data, "DecodeImage_jpeg", expand), np.stack(want))


def test_bmp_has_its_pixels() -> None:
    got = decoded(written(picture(), "BMP"), "DecodeImage_jpeg")
    np.testing.assert_array_equal(got, np.array(picture()))


@pytest.mark.parametrize(
    ("data", "like", "message"),
    [
        (b"RIFF", "DecodePng_3_0", "cannot be decoded"),
        (written(picture(), "PNG")[:50], "DecodePng_3_0", "cannot be decoded"),
        (written(picture().convert("CMYK"), "JPEG"), "DecodeJpeg_rgb_0", "of mode CMYK"),
        (written(picture().convert("RGBA"), "BMP"), "DecodeImage_jpeg", "of 32 bits"),
        (
            written(picture().resize((3, 1)), "JPEG"),
            "DecodeJpeg_half",
            "too small for a ratio of 2",
        ),
        (written(picture(), "JPEG"), "DecodePng_3_4", "of 3 channels cannot be decoded to 4"),
        (written(picture(), "GIF"), "DecodePng_3_4", "have 3 channels, not 4"),
    ],
    ids=["none", "cut", "cmyk", "bmp", "small", "opacity", "gif"],
)
def test_files_that_cannot_be_decoded_are_refused(data: bytes, like: str, message: str) -> None:
    with pytest.raises(ps.RunError, match=message):
        decoded(data, like)


@pytest.mark.parametrize(
    ("like", "change", "message"),
    [
        ("DecodeJpeg_half", lambda attrs: setattr(attrs["ratio"], "i", 3), "ratio of 1, 2, 4 or 8"),
        (
            "DecodeJpeg_half",
            lambda attrs: setattr(attrs["acceptable_fraction"], "f", 0.5),
            "truncat",
        ),
        ("DecodePng_3_0", lambda attrs: setattr(attrs["dtype"], "type", 17), "convert them to 8"),
    ],
)
def test_attributes_without_a_kernel_are_refused(like: str, change: Any, message: str) -> None:
    with pytest.raises(ps.Unsupported, match=message):
        decoded(b"", like, change)
