"""The model of joined steps of a decoder, which the compile cache stores in place of the decoder.

Its metadata have the inputs and outputs of its steps, besides the decoder's own: a process
that finds the plans of steps in the cache reads no model, and runs no pass.
"""

from __future__ import annotations

import json
import os

from penstock.artifact.decode import decode_type
from penstock.compiler.options import CompileOptions
from penstock.core.errors import InvalidModel
from penstock.frontends.load import check_and_sort, load
from penstock.ir.graph import Model
from penstock.ops.internal.joined_steps import JoinedSteps, PagedCache
from penstock.session.opening import DerivedModel

# The search for joined steps is imported only where its plans are not cached.

_STEPS = "penstock.steps"
"""the metadata key for the inputs and outputs of steps"""


class StepSource:
    """The decoder from which steps are derived: given, or at a path, from which it is read when it
    is needed."""

    def __init__(self, given: object, options: CompileOptions) -> None:
        self._given, self._options = given, options
        self._place = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        self._model: Model | None = None

    @property
    def path(self) -> str | None:
        """The file or folder of the model, if it is in one."""
        return self.model.path if self._place is None else os.path.abspath(self._place)

    @property
    def model(self) -> Model:
        """The model of a step, without the branch of a first step, whose caches grow."""
        if self._model is None:
            given, options = self._given, self._options
            if not isinstance(given, Model):
                given = load(
                    given,
                    limits=options.limits,
                    map_weights=options.map_weights,
                    signature=options.signature,
                )
            self._model = _of_further_steps(given)
        return self._model

    def joined(self) -> Model | DerivedModel:
        """Return the model of joined steps, or how to derive it from the file."""
        if self._place is None:
            return _joined(self.model)
        return DerivedModel(self._place, "joined steps", self._derived)

    def _derived(self, loaded: Model) -> Model:
        # If its rows cannot be joined, another runner uses the model.
        self._model = _of_further_steps(loaded)
        return _joined(self._model)


def _of_further_steps(model: Model) -> Model:
    from penstock.stepping.cache_branch import has_branches, with_branch
    from penstock.stepping.grown_caches import with_grown_caches

    return with_grown_caches(with_branch(model, cached=True) if has_branches(model) else model)


def _joined(model: Model) -> Model:
    """Return the model of joined steps. Raises ``RowsStay``."""
    from penstock.artifact.encode import encode_type
    from penstock.passes.lowering.join_steps import join_steps

    graph, steps = join_steps(model.graph)
    document: dict[str, object] = dict(zip(JoinedSteps._fields, steps, strict=True))
    for name, ports in (("rows", steps.rows), ("fed", steps.fed)):
        document[name] = {port: encode_type(type_) for port, type_ in ports.items()}
    metadata = {**model.metadata, _STEPS: json.dumps(document)}
    joined = Model({"main": graph}, "main", metadata=metadata)
    check_and_sort(joined)
    return joined


def joined_steps_of(model: Model) -> JoinedSteps:
    """Return the inputs and outputs of a model of joined steps. Raises ``InvalidModel``."""
    try:
        steps = JoinedSteps(**json.loads(model.metadata[_STEPS]))
        rows, fed = (
            {name: decode_type(type_) for name, type_ in ports.items()}
            for ports in (steps.rows, steps.fed)
        )
        caches, fixed = ([PagedCache(*cache) for cache in of] for of in (steps.caches, steps.fixed))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidModel(f"the stored plan of joined steps is damaged: {error!r}") from error
    return steps._replace(rows=rows, fed=fed, caches=caches, fixed=fixed)
