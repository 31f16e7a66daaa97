"""Dims of inputs on the command line: ``--shape``, by inputs and by the names of dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import click

from penstock.cli.base import Decorator
from penstock.core.errors import InvalidInput, quoted, suggest
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, TensorType, Type
from penstock.ir.graph import Model

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]
Assumed: TypeAlias = dict[str, str]
"""notes on dims that were not named, by input"""


def shape_option(more: str) -> Decorator:
    """The option for dims of inputs; its help ends with ``more``."""
    return click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="NAME=DIMS",
        help="Dims of an input, as in --shape x=1x3x224x224, or the size of a dim by its name in "
        f"the model, as in --shape sequence_length=64. {more}",
    )


SHAPES = shape_option("An unknown first dim counts as 1.")


@dataclass(frozen=True)
class GivenShapes:
    """The shapes of ``inputs``, and the ``sizes`` of dims by name, that ``--shape`` gives."""

    inputs: Mapping[str, Shape]
    sizes: Mapping[str, int]

    def __bool__(self) -> bool:
        return bool(self.inputs or self.sizes)

    def resolve(self, types: Mapping[str, Type], assumed: Assumed) -> dict[str, Shape]:
        """The shapes of these inputs that are tensors. An unknown first dim, which mostly is that
        of a batch, counts as 1, and is noted in ``assumed``. Raises ``InvalidInput`` for other
        unknown dims: with 1 an image would be of one pixel, and a text of one word."""
        tensors = {n: self._sized(t) for n, t in types.items() if isinstance(t, TensorType)}
        unknown = {
            name: t
            for name, t in tensors.items()
            if name not in self.inputs and (t.shape is None or any(map(_is_open, t.shape[1:])))
        }
        if unknown:
            raise InvalidInput(_which_to_name(unknown))
        shapes = {}
        for name, type_ in tensors.items():
            given = self.inputs.get(name)
            declared = type_.shape or ()
            if given is None and any(map(_is_open, declared)):
                assumed[name] = f"dim 0 of {type_} is taken for 1"
            known = tuple([dim if isinstance(dim, int) else 1 for dim in declared])
            shapes[name] = known if given is None else given
        return shapes

    def _sized(self, type_: TensorType) -> TensorType:
        """A type with the sizes of its dims that have one."""
        if not self.sizes or type_.shape is None:
            return type_
        shape = [self.sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in type_.shape]
        return TensorType(type_.dtype, tuple(shape))

    def check(self, types: Mapping[str, Type], shapes: Mapping[str, Shape]) -> None:
        """Raise ``InvalidInput`` unless values of inputs that have these shapes agree."""
        for name, shape in self.inputs.items():
            if shapes.get(name) != shape:
                raise InvalidInput(
                    f"--shape {name} is not the shape of the value that --input gives it"
                )
        for name, type_ in types.items():
            declared = type_.shape or () if isinstance(type_, TensorType) else ()
            for dim, size in zip(declared, shapes.get(name, ()), strict=False):
                if isinstance(dim, str) and self.sizes.get(dim, size) != size:
                    raise InvalidInput(
                        f"--shape {dim}={self.sizes[dim]}: input {quoted(name)} of type {type_} is "
                        f"given another shape, {list(shapes[name])}"
                    )


def _is_open(dim: object) -> bool:
    return not isinstance(dim, int)


def _which_to_name(types: Mapping[str, TensorType]) -> str:
    """The message about inputs whose unknown dims must be named, and how."""
    named = dict.fromkeys(
        dim for t in types.values() for dim in (t.shape or ())[1:] if isinstance(dim, str)
    )
    by_input = {}
    for name, type_ in types.items():
        dims = (2, 3) if type_.shape is None else type_.shape
        sizes = [str(dim if not _is_open(dim) else 64 if i else 1) for i, dim in enumerate(dims)]
        by_input[name] = f"{name}={'x'.join(sizes)}"
    # Dims without a name can be given with all of their input alone.
    nameless = [
        text
        for name, text in by_input.items()
        if types[name].shape is None or None in (types[name].shape or ())[1:]
    ]
    first = " ".join([f"--shape {text}" for text in (*[f"{n}=64" for n in named], *nameless)])
    whole = " ".join(f"--shape {text}" for text in by_input.values())
    other = f", or whole shapes, as in {whole}" if whole != first else ""
    inputs = ", ".join(
        f"{quoted(name)} of type {t}" if t.shape else f"{quoted(name)} of unknown rank"
        for name, t in types.items()
    )
    return f"unknown dims of input {inputs}: name them, as in {first}{other}"


def read_dims(text: str) -> Shape:
    """Dims as ``1x3x224x224``; anything else is wrong usage."""
    dims = [dim for dim in text.replace(",", "x").split("x") if dim]
    try:
        if not all(dim.isdecimal() for dim in dims):
            raise ValueError
        return tuple(map(int, dims))
    except ValueError:  # also of more digits than int reads
        raise click.UsageError(f"dims must look like 1x3x224x224, not {text!r}") from None


def names_in_model(model: Model, text: str) -> bool:
    """Whether the name that a ``--shape`` is for is that of an input or a dim of a model."""
    name = text.rpartition("=")[0]
    types, dims = _types_and_dims(model)
    return name in types or model.aliases.get(name) in types or name in dims


def _types_and_dims(model: Model) -> tuple[dict[str, Type], set[object]]:
    """The types of a model's inputs by name, and their dims."""
    types = {value.name: value.type for value in model.graph.inputs}
    return types, {d for t in types.values() if isinstance(t, TensorType) for d in t.shape or ()}


def read_shapes(model: Model, texts: Sequence[str]) -> list[GivenShapes]:
    """The shapes of ``--shape`` for as many plans as one name has, at least one; a name that has
    fewer keeps its last."""
    types, dims = _types_and_dims(model)
    inputs: dict[str, list[Shape]] = {}
    sizes: dict[str, list[int]] = {}
    for text in texts:
        # From the right: names of inputs may have the sign in them, and dims do not.
        name, equals, value = text.rpartition("=")
        if not equals:
            raise click.UsageError(f"--shape must be NAME=DIMS, not {text!r}")
        key = name if name in types else model.aliases.get(name, name)
        if key in types:
            inputs.setdefault(key, []).append(read_dims(value))
        elif name in dims:
            shape = read_dims(value)
            if len(shape) != 1:
                raise click.UsageError(f"--shape {text}: {name!r} is one dim, and has one size")
            sizes.setdefault(name, []).append(shape[0])
        else:
            known = [*types, *sorted(dim for dim in dims if isinstance(dim, str))]
            raise InvalidInput(f"--shape names no input or dim {name!r}: {suggest(name, known)}")
    count = max([1, *map(len, inputs.values()), *map(len, sizes.values())])

    return [GivenShapes(_nth(inputs, i), _nth(sizes, i)) for i in range(count)]


def _nth(lists: Mapping[str, Sequence[T]], i: int) -> dict[str, T]:
    return {name: items[min(i, len(items) - 1)] for name, items in lists.items()}


def all_shapes(model: Model, texts: Sequence[str], assumed: Assumed) -> dict[str, Shape]:
    """Shapes of all inputs: those of ``--shape``, else as declared (``GivenShapes.resolve``)."""
    types = {value.name: value.type for value in model.graph.inputs}
    return read_shapes(model, texts)[-1].resolve(types, assumed)


def show_assumed(result: JsonObject) -> None:
    """Say which shapes a result is for, and which dims were not named."""
    for name, what in result["inputs"].items():
        note = result["assumed"].get(name)
        hint = f" ({note}; --shape names others)" if note else ""
        click.echo(f"input {name}: {what}{hint}")
