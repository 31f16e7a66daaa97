"""The files of encoder-decoders: an encoder of the prompt, and a decoder of the text.

Exporters write them side by side, under these names, with a common suffix such as ``_quantized``::

    encoder_model.onnx              the prompt to hidden states
    decoder_model_merged.onnx       both of these, by an input use_cache_branch:
    decoder_model.onnx                the first step, which returns what cross attention reads
    decoder_with_past_model.onnx      a further step

or as ``encoder.onnx`` and ``decoder.onnx``, whose encoder returns what cross attention reads.
"""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import InvalidInput
from penstock.core.limits import Limits
from penstock.core.records import NamedTuple
from penstock.frontends.load import load
from penstock.ir.graph import Model, clone

_FIRST, _FURTHER, _MERGED = "decoder_model", "decoder_with_past_model", "decoder_model_merged"
_DECODERS = (_MERGED, _FURTHER, _FIRST, "decoder")
"""the longer ones first, since names of files begin with them"""
_ENCODERS = {"decoder": "encoder"}


class Halves(NamedTuple):
    """The models of an ``encoder``, of a decoder's ``step``, and of the conversion of the encoder's
    outputs to fixed inputs of the step, ``cross``, if there is one."""

    encoder: Model
    step: Model
    cross: Model | None


def read_halves(place: str | Path, limits: Limits | None) -> Halves | None:
    """Return the halves in a folder or beside a decoder's file, or None if there are none. Raises
    ``InvalidInput`` if a file is missing."""
    files = _files(Path(place))
    if files is None:
        return None
    # Most models have no halves.
    from penstock.stepping.cache_branch import has_branches, with_branch

    def read(path: Path) -> Model:
        return load(path, limits=limits, map_weights=True)

    encoder, decoders = files
    # A merged file holds weights once that the other two both have.
    if (path := decoders.get(_MERGED)) is not None:
        merged = read(path)
        if has_branches(merged):
            step, first = (with_branch(merged, branch) for branch in (True, False))
        else:
            step, first = merged, None
    elif _FURTHER in decoders:
        if _FIRST not in decoders:
            raise InvalidInput(
                f"{decoders[_FURTHER].name} makes further steps, and the model of the first one is "
                f"not beside it: {decoders[_FURTHER].name.replace(_FURTHER, _FIRST)}"
            )
        step, first = read(decoders[_FURTHER]), read(decoders[_FIRST])
    else:
        # It has no caches and reads all tokens in each step, or the encoder gives all inputs.
        step, first = read(decoders.get(_FIRST) or decoders["decoder"]), None
    return Halves(read(encoder), step, None if first is None else _cross_of(first))


def _files(place: Path) -> tuple[Path, dict[str, Path]] | None:
    """Return the file of the encoder, and those of decoders by their kind."""
    if place.is_dir():
        for folder in (place, place / "onnx"):
            for kind in _DECODERS:
                if (path := folder / f"{kind}.onnx").is_file():
                    return _beside(path, kind)
        return None
    for kind in _DECODERS:
        if place.name.startswith(kind):
            return _beside(place, kind)
    return None


def _beside(path: Path, kind: str) -> tuple[Path, dict[str, Path]] | None:
    """Return the files that belong to a decoder's file."""
    end = path.name.removeprefix(kind)
    encoder = path.with_name(_ENCODERS.get(kind, "encoder_model") + end)
    if not encoder.is_file():
        return None
    if kind == _MERGED:
        return encoder, {kind: path}
    others = {name: path.with_name(name + end) for name in (_FURTHER, _FIRST)}
    existing = {name: other for name, other in others.items() if other.is_file()}
    return encoder, {**existing, kind: path}


def _cross_of(first: Model) -> Model | None:
    """Return the part of a first step that computes inputs of cross attention, or None."""
    from penstock.passes.lowering.step_probes import is_of_encoder
    from penstock.stepping.cache_branch import with_outputs

    graph = clone(first.graph)
    kept = [value for value in graph.outputs if is_of_encoder(value.name)]
    return with_outputs(first, graph, kept) if kept else None
