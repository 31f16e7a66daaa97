"""What servers and steppers do with a session before requests come: plans, trials and proofs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import PenstockError, RowsStay
from penstock.core.types import NamedValues, RunValue

if TYPE_CHECKING:
    from penstock.compiler.options import InputShapes
    from penstock.session.session import Session


def compile_ahead(session: Session) -> None:
    """Compile the plan of a model whose inputs have known shapes, as ``Executors.compile_fixed``
    does."""
    session._executors.compile_fixed()


def run_ahead(session: Session, feeds: NamedValues) -> dict[str, RunValue]:
    """``session.run``, while no request is taken: its plan is compiled in any case."""
    executors = session._executors
    if not executors.compiles:
        request, key, values = session._subgraphs.resolve(feeds, None, None)
        executors.get(request.subgraph, key, values, exact=True)
    return session.run(feeds)


def freeze(session: Session) -> None:
    """Let no run compile from now on, as ``compile_in_run=False`` does."""
    session._executors.freeze(has_plans=True)


def check_hidden_rows(session: Session, feeds: NamedValues) -> None:
    """Raise ``PenstockError`` unless it is proven, for feeds of these shapes, that rows which a
    mask hides act on no others."""
    from penstock.compiler.padding import check_batch

    main = session._subgraphs.main
    try:
        check_batch(session._compiler, main, [feeds[name] for name in main.names])
    except RowsStay as reason:
        raise PenstockError(f"padding rows may affect other rows: {reason}") from None


def padding_masks(session: Session) -> tuple[str, ...]:
    """Return the inputs that say which rows of a batch pad."""
    main = session._subgraphs.main
    return tuple([main.names[i] for i in main.masks])


def values_of(session: Session, shapes: InputShapes) -> dict[str, np.ndarray]:
    """Return arrays of the given shapes by name, as ``Executors.values_of`` does."""
    names = session._subgraphs.main.names
    return dict(zip(names, session._executors.values_of(shapes), strict=True))
