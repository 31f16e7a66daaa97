"""Figures of the form of the code: functions, classes, signatures, calls, comments and lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from tools.source_tree import (
    SOURCE,
    Function,
    Places,
    assignments,
    functions,
    modules,
    nodes,
    place,
    text,
    tree,
    written,
)

# The files that are hardest to read, by the ends of their paths.
HARD_FILES = (
    "task_loop.py",
    "frame_graph.py",
    "hoist_recurrences.py",
    "frames/run.py",
    "scheduler.py",
    "native/kernel.py",
    "arena_layout.py",
    "replica_queue.py",
    "cluster/cluster.py",
    "stages.py",
)

_DIRECTIVE = re.compile(r"#\s*(type:|noqa|pyright:|ruff:|fmt:)")


def length(function: Function) -> int:
    """Lines of a function, its decorators and its docstring not counted."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        return 1 + (function.end_lineno or 0) - body[1].lineno + body[0].lineno - function.lineno
    return 1 + (function.end_lineno or 0) - function.lineno


_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)


def complexity(function: Function) -> int:
    """The cyclomatic complexity (McCabe 1976): one more than the decisions, those of nested
    functions not counted."""
    count = 1
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            count += 1
        stack.extend(ast.iter_child_nodes(node))
    return count


def tuple_splats() -> Places:
    """Calls with ``*name`` where the same function, or one around it, assigns a tuple to ``name``,
    element by element: the names of the arguments are lost."""
    return [
        splat
        for module in written()
        for node in tree(module).body
        for splat in _splats(module, node, frozenset())
    ]


def _splats(module: str, scope: ast.AST, outer: frozenset[str]) -> Iterator[str]:
    own, inner, splats = set(outer), [], []
    stack = list(ast.iter_child_nodes(scope)) if isinstance(scope, Function) else [scope]
    while stack:
        node = stack.pop()
        if isinstance(node, Function):
            inner.append(node)
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(scope, Function):
            pairs = assignments([node])
            own |= {target.id for target, value in pairs if _is_display(value)}
        elif isinstance(node, ast.Call):
            starred = [a.value for a in node.args if isinstance(a, ast.Starred)]
            splats += [(node, x.id) for x in starred if isinstance(x, ast.Name)]
        stack.extend(ast.iter_child_nodes(node))
    splats.sort(key=lambda splat: splat[0].lineno)
    yield from (place(module, call, f"*{name}") for call, name in splats if name in own)
    for function in inner:
        yield from _splats(module, function, frozenset(own))


def _is_display(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_display(value.body) or _is_display(value.orelse)
    return isinstance(value, ast.Tuple) and bool(value.elts)


def _parameters(function: Function) -> list[ast.arg]:
    return [child for child in ast.iter_child_nodes(function.args) if isinstance(child, ast.arg)]


def any_in_signatures() -> Places:
    """Annotations of parameters and results that mention ``Any``."""
    places = []
    for module, function in functions():
        annotations = [*[a.annotation for a in _parameters(function)], function.returns]
        places += [
            place(module, annotation, f"{function.name}()")
            for annotation in filter(None, annotations)
            if any(isinstance(x, ast.Name) and x.id == "Any" for x in ast.walk(annotation))
        ]
    return places


def functions_over_6_parameters() -> Places:
    """Functions of more than six parameters, ``*args`` and ``**kwargs`` being one each."""
    places = []
    for module, function in functions():
        names = [a.arg for a in _parameters(function)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > 6:
            places.append(place(module, function, f"{function.name}(), {count} parameters"))
    return places


def classes_over_20_attributes() -> Places:
    """Classes whose methods assign more than 20 attributes of ``self``."""
    places = []
    for module in written():
        for cls in (node for node in nodes(module) if isinstance(node, ast.ClassDef)):
            stores = [n for n in ast.walk(cls) if isinstance(n, ast.Attribute)]
            stores = [n for n in stores if isinstance(n.ctx, ast.Store)]
            names = {n.attr for n in stores if getattr(n.value, "id", "") == "self"}
            if len(names) > 20:
                places.append(place(module, cls, f"{cls.name}, {len(names)} attributes"))
    return places


def python_lines() -> int:
    """Lines of all modules but generated ones, and but those of comments, of which there is to be
    more: two bounds must not pull at one line."""
    lines = chain.from_iterable(text(module).splitlines() for module in written())
    return sum(not line.lstrip().startswith("#") for line in lines)


def c_lines() -> int:
    """Lines of C, headers included."""
    paths = [*SOURCE.rglob("*.c"), *SOURCE.rglob("*.h")]
    return sum(path.read_text().count("\n") for path in paths)


def comments(module: str) -> tuple[int, int]:
    """The ``#`` comments of a module, those for tools not counted, and its lines of code: not
    blank, no comment and no docstring."""
    if "#" in text(module):
        tokens = tokenize.generate_tokens(io.StringIO(text(module)).readline)
        found = [token for token in tokens if token.type == tokenize.COMMENT]
    else:
        found = []
    documented = set()
    for node in nodes(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    code = [
        line.strip()
        for number, line in enumerate(text(module).splitlines(), 1)
        if number not in documented
    ]
    written_for_readers = [token for token in found if not _DIRECTIVE.match(token.string)]
    return len(written_for_readers), sum(line[:1] not in ("", "#") for line in code)


def hard_modules() -> list[str]:
    """The modules of ``HARD_FILES``. Raises ``LookupError`` for one that is not there once."""
    names = []
    for end in HARD_FILES:
        ends = [m for m in written() if modules()[m].as_posix().endswith(f"/{end}")]
        if len(ends) != 1:
            raise LookupError(f"{len(ends)} modules are {end}: {', '.join(ends)}")
        names += ends
    return names


def comment_percent() -> float:
    """``#`` comments for 100 lines of code."""
    return _percent(written())


def comment_percent_in_hard_files() -> float:
    """``#`` comments for 100 lines of code in the files that are hardest to read."""
    return _percent(hard_modules())


def _percent(names: Iterable[str]) -> float:
    counts = [comments(module) for module in names]
    return round(100 * sum(c for c, _ in counts) / sum(lines for _, lines in counts), 1)


MEASURES: dict[str, Callable[[], float]] = {
    measure.__name__: measure
    for measure in (python_lines, c_lines, comment_percent, comment_percent_in_hard_files)
}
"""The functions that give numbers without places, by name"""
