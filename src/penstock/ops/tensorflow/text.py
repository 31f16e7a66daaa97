"""String operations: number conversion, case conversion, substrings, regular expressions, hashes.

TensorFlow's strings are bytes. Here they are decoded as UTF-8, with lone surrogates for invalid
bytes.
"""

from __future__ import annotations

import base64
import math
import re
import string
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache, partial
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import BOOL, INT64, STRING, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.hashes import fingerprints, murmur_hashes, sip_hashes, text_hashes
from penstock.ops.common.regex import Groups, RegexError, simple_pattern
from penstock.ops.onnx.text import strings
from penstock.ops.tensorflow import common

operator = partial(common.operator, strings=True)
array_operator = partial(common.array_operator, strings=True)
_same = rules.same_shape(STRING)


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def texts(x: np.ndarray) -> Iterable[str]:
    if x.dtype != STRING:
        raise ShapeError(f"the input must have string elements, not {x.dtype}")
    return with_checkpoints(x.reshape(-1).tolist())


def mapped(function: Callable[[str], str], x: np.ndarray) -> np.ndarray:
    """Apply ``function`` to each string of a tensor."""
    return strings([function(text) for text in texts(x)], x.shape)


# Numbers.

_MOST_DIGITS = 10_000
_FLAGS = frozenset({"", " ", "+", "-", "0"})


@operator("AsString", infer=_same)
def as_string(node: Node, types: Types) -> Kernel:
    """Format numbers like C's ``printf``, with the flag ``fill``, a width and a precision."""
    attrs = node.attrs
    fill, width, precision = attrs["fill"], attrs["width"], attrs["precision"]
    if fill not in _FLAGS:
        raise ShapeError(f"fill {fill!r} must be empty, ' ', '+', '-' or '0'")
    if attrs["scientific"] and attrs["shortest"]:
        raise ShapeError("scientific and shortest must not both be true")
    if max(width, precision) > _MOST_DIGITS:
        raise ShapeError(f"width {width} and precision {precision} must be at most {_MOST_DIGITS}")
    size = (str(width) if width > -1 else "") + (f".{precision}" if precision > -1 else "")
    conversion = "e" if attrs["scientific"] else "g" if attrs["shortest"] else "f"
    # Infinities are not padded with zeros, nor unsigned values given a sign.
    real, odd = (f"%{flag}{size}{conversion}" for flag in (fill, fill.strip("0")))

    def number(x: float) -> str:
        return (real if np.isfinite(x) else odd) % x

    def run(x: np.ndarray) -> np.ndarray:
        kind = x.dtype.kind
        if kind in "iub" and (conversion != "f" or precision > -1):
            raise ShapeError(
                f"precision, scientific and shortest are only valid for floats, not for {x.dtype}"
            )
        elements = with_checkpoints(x.reshape(-1).tolist())
        if kind == "b":
            written = ["true" if element else "false" for element in elements]
        elif kind in "iu":
            flag = fill if kind == "i" else fill.strip(" +")
            written = [f"%{flag}{size}d" % element for element in elements]
        elif kind == "c":
            written = [f"({number(z.real)},{number(z.imag)})" for z in elements]
        elif kind == "O":
            written = [f"%{fill.strip(' +0')}{size}s" % element for element in elements]
        else:
            written = [number(float(element)) for element in elements]
        return strings(written, x.shape)

    return Kernel(run)


_SPACE = " \t\n\v\f\r"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)", re.IGNORECASE
)
_HEXADECIMAL = re.compile(
    r"[+-]?0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?", re.IGNORECASE
)


def _number_type(attrs: Attrs) -> np.dtype:
    return common.named_dtype(attrs, "out_type", "float32", "iuf")


@array_operator(
    "StringToNumber",
    infer=rules.same_shape(_number_type),
    prepared={"dtype": lambda node: _number_type(node.attrs)},
)
def string_to_number(x: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    return np.array([parsed_number(text, dtype) for text in texts(x)], dtype).reshape(x.shape)


def parsed_number(text: str, dtype: np.dtype) -> int | float:
    """The number that a text is. Raises ``ShapeError`` if it is none in the range of a dtype."""
    bare = text.strip(_SPACE)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        # Python raises its own error for more than 4300 digits.
        if _INTEGER.fullmatch(bare) and len(bare) < 4000:
            value = int(bare)
            signed = bounds.min < 0 or not bare.startswith("-")
            if signed and bounds.min <= value <= bounds.max:
                return value
    elif _REAL.fullmatch(bare):
        return float(bare)
    elif _HEXADECIMAL.fullmatch(bare):
        return float.fromhex(bare)
    raise ShapeError(f"{text!r:.100} is not a number in the range of {dtype}")


# Case conversion, joining and stripping.

_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_UPPER = str.maketrans(string.ascii_lowercase, string.ascii_uppercase)


def _case(name: str, table: dict[int, int], whole: Callable[[str], str]) -> None:
    @operator(name, infer=_same)
    def compile(node: Node, types: Types) -> Kernel:
        """Change the case of ASCII letters, or of all letters if the encoding is "utf-8"."""
        encoding = node.attrs["encoding"]
        if encoding not in ("", "utf-8"):
            raise ShapeError(f"encoding {encoding!r} must be '' or 'utf-8'")
        change = whole if encoding else lambda text: text.translate(table)
        return Kernel(partial(mapped, change))


_case("StringLower", _LOWER, str.lower)
_case("StringUpper", _UPPER, str.upper)


@array_operator("StringStrip", infer=_same)
def string_strip(x: np.ndarray) -> np.ndarray:
    return mapped(lambda text: text.strip(_SPACE), x)


def _infer_join(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [rules.tensor(types, i).shape for i in range(len(types))]
    arrays = [shape for shape in shapes if shape != ()]
    if not arrays:
        return (TensorType(STRING, ()),)
    for shape in arrays[1:]:
        rules.check_shape("a string tensor", shape, arrays[0])
    known = [shape for shape in arrays if shape is not None]
    return (TensorType(STRING, known[0] if known and None not in shapes else None),)


@array_operator("StringJoin", infer=_infer_join)
def string_join(*inputs: np.ndarray, separator: str = "") -> np.ndarray:
    """Concatenate inputs of equal shape, or scalars, elementwise."""
    shapes = [x.shape for x in inputs if x.ndim] or [()]
    if any(shape != shapes[0] for shape in shapes):
        raise ShapeError(
            "the inputs of StringJoin must be scalars or have the same shape, but have shapes "
            f"{shapes}"
        )
    parts = [np.broadcast_to(x, shapes[0]).reshape(-1).tolist() for x in inputs]
    reserve(sum(len(text) for part in parts for text in with_checkpoints(part)))
    rows = with_checkpoints(list(zip(*parts, strict=True)))
    return strings([valid(separator.join(row)) for row in rows], shapes[0])


def _infer_reduced(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape, axes = rules.tensor(types, 0).shape, rules.all_known(rules.ints(types, consts, 1))
    if shape is None or axes is None:
        return (TensorType(STRING),)
    gone = rules.normalize_axes(axes, len(shape))
    kept = [dim for i, dim in enumerate(shape) if i not in gone]
    dims = [1 if i in gone else dim for i, dim in enumerate(shape)]
    return (TensorType(STRING, tuple(dims if attrs.get("keep_dims") else kept)),)


@array_operator("ReduceJoin", infer=_infer_reduced)
def reduce_join(
    x: np.ndarray, axes: np.ndarray, *, keep_dims: bool = False, separator: str = ""
) -> np.ndarray:
    """Join the strings along axes; places along the first one given follow each other."""
    gone = rules.normalize_axes(axes.reshape(-1).tolist(), x.ndim)
    kept = [i for i in range(x.ndim) if i not in gone]
    dims = [1 if i in gone else n for i, n in enumerate(x.shape)]
    shape = tuple(dims if keep_dims else [x.shape[i] for i in kept])
    count = math.prod([x.shape[i] for i in gone])
    rows = x.transpose([*kept, *gone[::-1]]).reshape(math.prod(shape), count).tolist()
    reserve(sum(len(text) for row in rows for text in with_checkpoints(row)))
    return strings([valid(separator.join(row)) for row in with_checkpoints(rows)], shape)


def valid(text: str) -> str:
    """Decode invalid bytes again: those at the ends of joined parts may form a character."""
    return text if text.isascii() else decoded(encoded(text))


# Bytes in text.


def _infer_raw(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = rules.tensor(types, 0).shape
    dtype = common.named_dtype(attrs, "out_type")
    return (TensorType(dtype, None if shape is None else (*shape, None)),)


@operator("DecodeRaw", infer=_infer_raw)
def decode_raw(node: Node, types: Types) -> Kernel:
    """The elements whose bytes each string holds; all strings have the same number of them."""
    dtype = common.named_dtype(node.attrs, "out_type")
    stored = dtype.newbyteorder("<" if node.attrs["little_endian"] else ">")

    def run(x: np.ndarray) -> np.ndarray:
        parts = [encoded(text) for text in texts(x)]
        sizes = {len(part) for part in parts} or {0}
        if len(sizes) > 1 or min(sizes) % dtype.itemsize:
            raise ShapeError(
                f"strings of {sorted(sizes)[:9]} bytes must have the same number of elements of "
                f"{dtype.itemsize}"
            )
        # Bytes other than 0 and 1 are no truth values.
        elements = np.frombuffer(b"".join(parts), np.uint8 if dtype == BOOL else stored)
        return elements.astype(dtype).reshape(*x.shape, sizes.pop() // dtype.itemsize)

    return Kernel(run)


@array_operator("EncodeBase64", infer=_same)
def encode_base64(x: np.ndarray, *, pad: bool = False) -> np.ndarray:
    """Base64 for URLs (RFC 4648, section 5), perhaps padded."""

    def written(text: str) -> str:
        data = base64.urlsafe_b64encode(encoded(text)).decode()
        return data if pad else data.rstrip("=")

    return mapped(written, x)


_BASE64 = re.compile(r"[A-Za-z0-9_-]*={0,2}")


@array_operator("DecodeBase64", infer=_same)
def decode_base64(x: np.ndarray) -> np.ndarray:
    def read(text: str) -> str:
        data = text.rstrip("=")
        missing = -len(data) % 4
        if not _BASE64.fullmatch(text) or missing == 3 or len(text) - len(data) > missing:
            raise ShapeError(f"{text!r:.100} is no base64 for URLs")
        return decoded(base64.urlsafe_b64decode(data + "=" * missing))

    return mapped(read, x)


# Splitting and substrings.


_WORD = re.compile(f"[^{_SPACE}]+")


def _split(text: str, separator: str, most: int) -> list[str]:
    if most == 0:
        return [text]
    if separator:
        return text.split(separator, most)
    words: list[str] = []
    end = 0
    for match in _WORD.finditer(text):
        if len(words) == most:
            break
        words.append(match[0])
        end = match.end()
    # After maxsplit splits, the rest is a word, even if empty.
    return [*words, text[end:].lstrip(_SPACE)] if len(words) == most else words


@array_operator(
    "StringSplitV2",
    infer=rules.always(
        TensorType(INT64, (None, 2)), TensorType(STRING, (None,)), TensorType(INT64, (2,))
    ),
)
def string_split(x: np.ndarray, separator: np.ndarray, *, maxsplit: int) -> tuple[np.ndarray, ...]:
    """Return indices, values and shape of a sparse tensor with one row per string. An empty
    separator means any whitespace.
    """
    if x.ndim != 1 or separator.ndim:
        raise ShapeError(
            f"the input must have rank 1 and the separator rank 0, but have shapes {x.shape} and "
            f"{separator.shape}"
        )
    between = separator.item()
    rows = [_split(text, between, maxsplit) for text in texts(x)]
    indices, shape = sparse_layout(rows)
    return indices, strings([part for row in rows for part in row], (len(indices),)), shape


@array_operator(
    "StringSplit",
    infer=rules.always(
        TensorType(INT64, (None, 2)), TensorType(STRING, (None,)), TensorType(INT64, (2,))
    ),
)
def string_split_at(
    x: np.ndarray, delimiter: np.ndarray, *, skip_empty: bool
) -> tuple[np.ndarray, ...]:
    """As ``StringSplitV2``, at each byte of the delimiter; without a delimiter, into bytes. The
    empty text has no parts."""
    if x.ndim != 1 or delimiter.ndim:
        raise ShapeError(
            f"the input must have rank 1 and the delimiter rank 0, but have shapes {x.shape} and "
            f"{delimiter.shape}"
        )
    ends = encoded(delimiter.item())
    between = re.compile(b"[" + re.escape(ends) + b"]") if ends else None
    rows = []
    for text in texts(x):
        data = encoded(text)
        if between and data:
            parts = between.split(data)
        else:
            parts = [data[i : i + 1] for i in range(len(data))]
        rows.append([decoded(part) for part in parts if part or not skip_empty])
    indices, shape = sparse_layout(rows)
    return indices, strings([part for row in rows for part in row], (len(indices),)), shape


def sparse_layout(rows: Sequence[Sized]) -> tuple[np.ndarray, np.ndarray]:
    """Indices and shape of a sparse matrix in which the elements of each row start at column 0."""
    counts = np.array([len(row) for row in rows], np.int64)
    total = int(counts.sum())
    indices = np.empty((total, 2), np.int64)
    indices[:, 0] = np.repeat(np.arange(len(rows)), counts)
    indices[:, 1] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return indices, np.array([len(rows), counts.max(initial=0)], np.int64)


@array_operator("StringLength", infer=rules.same_shape(INT32))
def string_length(x: np.ndarray, *, unit: str) -> np.ndarray:
    """The length in bytes, or in characters; an invalid byte counts as one character unless it is a
    continuation byte."""
    rows = map(encoded, texts(x))
    if unit == "UTF8_CHAR":
        lengths = [sum(byte & 0xC0 != 0x80 for byte in data) for data in rows]
    else:
        lengths = [len(data) for data in rows]
    return np.array(lengths, np.int32).reshape(x.shape)


def _infer_substr(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [rules.tensor(types, i).shape for i in range(3)]
    rules.check_shape("the lengths", shapes[2], shapes[1])
    return (TensorType(STRING, rules.broadcast_shapes(shapes[:2])),)


@array_operator("Substr", infer=_infer_substr)
def substr(x: np.ndarray, positions: np.ndarray, lengths: np.ndarray, *, unit: str) -> np.ndarray:
    """Negative positions count from the end. A negative length means the rest of the string in unit
    BYTE, and an empty string in unit UTF8_CHAR."""
    whole = unit == "UTF8_CHAR"
    if positions.shape != lengths.shape:
        raise ShapeError(f"pos {positions.shape} and len {lengths.shape} must have the same shape")

    def part(text: str, position: int, length: int) -> str:
        content: Any = text if whole else encoded(text)
        if not -len(content) <= position <= len(content):
            raise ShapeError(f"position {position} is out of range for {text!r:.100}")
        first = position + len(content) if position < 0 else position
        if length < 0:
            content = content[first:first] if whole else content[first:]
        else:
            content = content[first : first + length]
        return content if whole else decoded(content)

    shape = np.broadcast_shapes(x.shape, positions.shape)
    sides = [np.broadcast_to(side, shape).reshape(-1).tolist() for side in (positions, lengths)]
    rows = zip(texts(np.broadcast_to(x, shape)), *sides, strict=True)
    return strings([part(*row) for row in rows], shape)


# Regular expressions.

_REFERENCE = re.compile(r"\\(.?)", re.DOTALL)


class _Replacement:
    """Replaces all matches of an RE2 pattern, or the first, by ``rewrite``, in which ``\\1`` is the
    first group and ``\\0`` the whole match. Raises ``ShapeError`` for invalid patterns."""

    def __init__(self, pattern: str, rewrite: str, everywhere: bool) -> None:
        self.everywhere = everywhere
        self.simple = None
        self.parts: list[str | int] = []
        end = 0
        for match in _REFERENCE.finditer(rewrite):
            mark = match[1]
            if mark not in (*string.digits, "\\"):
                raise ShapeError(f"rewrite {rewrite!r} has a backslash without a digit after it")
            self.parts += [rewrite[end : match.start()], "\\" if mark == "\\" else int(mark)]
            end = match.end()
        self.parts.append(rewrite[end:])
        try:
            self.groups = Groups(pattern)
        except RegexError as error:
            raise ShapeError(
                f"pattern {pattern!r:.100} is not a valid RE2 pattern: {error}"
            ) from error
        numbers = [part for part in self.parts if isinstance(part, int)]
        # RE2 leaves strings unchanged if the pattern lacks a referenced group.
        self.lacking = max(numbers, default=0) > self.groups.groups
        if not numbers:
            self.simple = simple_pattern(pattern)
        self.plain = "".join(part for part in self.parts if isinstance(part, str))

    def __call__(self, text: str) -> str:
        if self.lacking:
            return text
        if self.simple is not None:
            return self.simple.sub(lambda match: self.plain, text, count=int(not self.everywhere))
        pieces: list[str] = []
        at, last = 0, -1
        while at <= len(text):
            spans = self.groups.spans(text, at)
            if spans is None:
                break
            pieces.append(text[at : spans[0]])
            if spans[0] == spans[1] == last:  # no empty match directly after another match
                pieces.append(text[last : last + 1])
                at = last + 1
                continue
            pieces += [self._part(part, text, spans) for part in self.parts]
            at = last = spans[1]
            if not self.everywhere:
                break
        return "".join(pieces) + text[at:]

    @staticmethod
    def _part(part: str | int, text: str, spans: tuple[int, ...]) -> str:
        if isinstance(part, str):
            return part
        begin, end = spans[2 * part : 2 * part + 2]
        return text[begin:end] if begin >= 0 else ""


@operator("RegexReplace", infer=_same)
def regex_replace(node: Node, types: Types) -> Kernel:
    """``pattern`` and ``rewrite`` are attributes, or inputs 1 and 2."""
    attrs = node.attrs
    everywhere = bool(attrs.get("replace_global", True))
    if "pattern" in attrs:
        return Kernel(partial(mapped, _Replacement(attrs["pattern"], attrs["rewrite"], everywhere)))
    replacement = lru_cache(maxsize=4)(partial(_Replacement, everywhere=everywhere))

    def run(x: np.ndarray, pattern: np.ndarray, rewrite: np.ndarray) -> np.ndarray:
        if pattern.ndim or rewrite.ndim:
            raise ShapeError(
                f"pattern and rewrite must be scalars, but have shapes {pattern.shape} and "
                f"{rewrite.shape}"
            )
        return mapped(replacement(pattern.item(), rewrite.item()), x)

    return Kernel(run)


# Hashes.


@operator("StringToHashBucket", infer=rules.same_shape(INT64))
@operator("StringToHashBucketFast", infer=rules.same_shape(INT64))
@operator("StringToHashBucketStrong", infer=rules.same_shape(INT64))
def string_to_hash_bucket(node: Node, types: Types) -> Kernel:
    """Hash with FarmHash's fingerprint, with SipHash if attribute ``key`` [2] is set, or with the
    older MurmurHash."""
    buckets, key = node.attrs["num_buckets"], node.attrs.get("key")
    if buckets < 1 or (key is not None and len(key) != 2):
        raise ShapeError(
            f"num_buckets {buckets} must be at least 1, and key {key} must have two elements"
        )
    hashes = murmur_hashes if node.op.name == "StringToHashBucket" else fingerprints
    if key is not None:
        hashes = partial(sip_hashes, secret=key)

    def run(x: np.ndarray) -> np.ndarray:
        numbers = text_hashes(list(texts(x)), hashes)
        return (numbers % np.uint64(buckets)).astype(np.int64).reshape(x.shape)

    return Kernel(run)


# Templates.


@operator("StringFormat", infer=rules.always(TensorType(STRING, ())))
def string_format(node: Node, types: Types) -> Kernel:
    """Replace the placeholders of a template by the contents of the inputs. If ``summarize`` is not
    negative, only the first and last ``summarize`` elements of a dim longer than twice that are
    shown."""
    attrs = node.attrs
    mark, shown = attrs["placeholder"], attrs["summarize"]
    between = attrs["template"].split(mark) if mark else []
    if len(between) != len(node.inputs) + 1:
        raise ShapeError(
            f"template {attrs['template']!r:.100} has {max(len(between) - 1, 0)} placeholders, "
            f"but the node has {len(node.inputs)} inputs"
        )

    def run(*inputs: np.ndarray) -> np.ndarray:
        values = [_summary(x, shown, 1) for x in inputs]
        pairs = zip(between, [*values, ""], strict=True)
        return strings(["".join([part for pair in pairs for part in pair])], ())

    return Kernel(run)


_STREAMS = ("stderr", "stdout", "log(info)", "log(warning)", "log(error)")


@operator("PrintV2", pure=False)
def print_text(node: Node, types: Types) -> Kernel:
    """Print a text, ``first_n`` times at most if that is not negative. Logs go to stderr; no model
    writes files."""
    attrs = node.attrs
    stream, end, left = attrs["output_stream"], attrs["end"], attrs.get("first_n", -1)
    if stream not in _STREAMS:
        raise ShapeError(f"output_stream {stream!r:.100} is not one of {', '.join(_STREAMS)}")

    def run(x: np.ndarray) -> None:
        nonlocal left
        if left:
            text = str(rules.one_element(x, "the text").item()) + end
            file = sys.stdout if stream == "stdout" else sys.stderr
            # Lone surrogates, which stand for bytes that are not UTF-8, cannot be written.
            file.write(text.encode(errors="backslashreplace").decode())
        left -= left > 0

    return Kernel(run)


def _real(x: float, dtype: type[np.floating]) -> str:
    """Format with the digits that are always exact, or, if these do not suffice, with enough digits
    to parse back to the same number."""
    few, all_digits = (15, 17) if dtype is np.float64 else (6, 9)
    text = f"%.{few}g" % x
    return text if dtype(text) == dtype(x) or np.isnan(x) else f"%.{all_digits}g" % x


def _summary(x: np.ndarray, shown: int, depth: int) -> str:
    if not x.ndim:
        element = x.item()
        if x.dtype == STRING:
            return f'"{element}"'
        if x.dtype.kind in "iub":
            return str(int(element))
        return _real(element, np.float64 if x.dtype == np.float64 else np.float32)
    if not x.size:
        return "[]"
    whole = shown < 0 or len(x) <= 2 * shown
    rows = list(x) if whole else [*x[:shown], *x[len(x) - shown :]]
    parts = [_summary(np.asarray(row, x.dtype), shown, depth + 1) for row in with_checkpoints(rows)]
    if not whole:
        parts.insert(shown, "...")
    # Rows are on separate lines, with an empty line between matrices.
    joint = " " if x.ndim == 1 else "\n" * (x.ndim - 1) + " " * depth
    return f"[{joint.join(parts)}]"
