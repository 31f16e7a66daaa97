"""Figures that may only fall: each has a bound in ``tests/test_architecture.py``, today's figure.

A figure is the number of the places that its function lists; ``python tools/architecture.py NAME``
prints these. What is counted is found by the names of classes, functions and files rather than by
folders, so that modules can move.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain

from tools.code_style import (
    any_in_signatures,
    classes_over_20_attributes,
    functions_over_6_parameters,
    tuple_splats,
)
from tools.source_tree import (
    PACKAGE,
    SOURCE,
    Function,
    Places,
    assignments,
    class_of_name,
    functions,
    modules,
    nodes,
    place,
    text,
    top,
    tree,
    written,
)
from tools.string_imports import all_string_imports

TESTS = SOURCE.parent.parent / "tests"

# Where a graph is compiled and run. What transforms it there, out of the pipeline's sight, counts.
COMPILING = ("session", "compiler", "executors", "cluster")
# Functions of passes that those call who compile: the pipeline, and the copy that it works on.
ENTRY_POINTS = {"run_passes", "optimize", "cut"}

_TIME = re.compile(r"_(S|MS|US|NS)$")
_ENVIRONMENT = re.compile(rf"{PACKAGE.upper()}_[A-Z_]+")


def string_imports() -> Places:
    """Imports by string, but those of tables: ``imported("penstock.a.b")``, ``_of("a.b")``."""
    calls = [s for s in all_string_imports() if not s.in_table]
    return [f"{s.module}, line {s.line}: {s.path}" for s in calls]


def tabled_imports() -> Places:
    """Modules that tables name, to be imported by string."""
    entries = [s for s in all_string_imports() if s.in_table]
    return [f"{s.module}, line {s.line}: {s.path}" for s in entries]


def backend_members() -> Places:
    """Members that the protocol ``Backend`` lacks and ``getattr`` or ``hasattr`` looks for in
    backends, each once."""
    members: dict[str, Places] = {}
    for name, where in _looked_up():
        members.setdefault(name, []).append(where)
    return [f"{name}: {'; '.join(places)}" for name, places in sorted(members.items())]


def backend_lookups() -> Places:
    """Calls of ``getattr`` and ``hasattr`` that look for ``backend_members``."""
    return [f"{where}: {name}" for name, where in _looked_up()]


def _looked_up() -> Iterator[tuple[str, str]]:
    """The literal names that are looked up in backends, and where. An object is a backend if its
    name is ``backend``, or one that the module annotates with a protocol of backends or takes from
    a collection of them."""
    protocol = class_of_name("Backend")[1]
    declared = {node.name for node in protocol.body if isinstance(node, Function)}
    for module in written():
        if "backend" not in text(module).lower():
            continue
        calls = [n for n in nodes(module) if isinstance(n, ast.Call) and len(n.args) > 1]
        lookups = [c for c in calls if getattr(c.func, "id", "") in ("getattr", "hasattr")]
        known = _backends_of(module) if lookups else set()
        for call in lookups:
            owner, name = call.args[:2]
            of_backend = not known.isdisjoint(_identifiers(owner))
            if of_backend and isinstance(name, ast.Constant) and name.value not in declared:
                yield str(name.value), place(module, call)


def _backends_of(module: str) -> set[str]:
    """Names of variables and attributes of ``module`` that are backends, or collections of them."""
    known = {"backend", "backends"}
    bound: list[tuple[ast.expr, ast.expr]] = []
    for node in nodes(module):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            if re.search(r"\b(\w*Backend|Threaded)\b", ast.unparse(node.annotation)):
                known.update([node.arg] if isinstance(node, ast.arg) else _identifiers(node.target))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                bound.append((node.target, node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            bound.append((node.target, node.iter))
        elif isinstance(node, ast.Assign):
            bound.append((node.targets[0], node.value))
    before = -1
    while len(known) > before:
        before = len(known)
        for target, value in bound:
            if known & set(_identifiers(value)):
                known.update(_identifiers(target))
    return known


def _identifiers(node: ast.expr) -> Iterator[str]:
    """The last name of ``a.b.name``, also where an element or a selection of it is taken."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Subscript):
        yield from _identifiers(node.value)
    elif isinstance(node, ast.ListComp | ast.GeneratorExp):
        yield from _identifiers(node.elt)


def fields(name: str) -> Places:
    """The fields of the record of a name."""
    module, record = class_of_name(name)
    own = [node for node in record.body if isinstance(node, ast.AnnAssign)]
    return [
        place(module, node, ast.unparse(node.target))
        for node in own
        if "ClassVar" not in ast.unparse(node.annotation)
    ]


def kernel_fields() -> Places:
    """The fields of ``Kernel``, but its facets: records of its module."""
    return _fields_of_kernel(facets=False)


def kernel_facets() -> Places:
    """The facets of ``Kernel``."""
    return _fields_of_kernel(facets=True)


def _fields_of_kernel(facets: bool) -> Places:
    module, record = class_of_name("Kernel")
    records = {c.name for c in tree(module).body if isinstance(c, ast.ClassDef) and fields(c.name)}
    own = [node for node in record.body if isinstance(node, ast.AnnAssign)]
    kernels = {place(module, n, ast.unparse(n.target)): ast.unparse(n.annotation) for n in own}
    named = fields("Kernel")
    return [where for where in named if (kernels[where] in records) == facets]


@cache
def operation_names() -> frozenset[str]:
    """The names of all operations: those of the index of families, and the internal ones."""
    names = set((SOURCE / "ops" / "families.txt").read_text().split())
    for module in written():
        if 'Op("' in text(module):
            calls = [n for n in nodes(module) if isinstance(n, ast.Call) and n.args]
            made = [n.args[0] for n in calls if getattr(n.func, "id", "") == "Op"]
            names |= {str(x.value) for x in made if isinstance(x, ast.Constant)}
    return frozenset(name for name in names if not name.endswith(":"))


def _strings(node: ast.expr) -> Iterator[str]:
    """The strings in tuples, lists, sets and mappings of an expression, nested ones too; the words
    of ``"...".split()`` each."""
    for part in ast.walk(node):
        if isinstance(part, ast.Tuple | ast.List | ast.Set):
            elements: list[ast.expr | None] = [*part.elts]
        elif isinstance(part, ast.Dict):
            elements = [*part.keys, *part.values]
        elif isinstance(part, ast.Call) and getattr(part.func, "attr", "") == "split":
            words = part.func.value if isinstance(part.func, ast.Attribute) else None
            if isinstance(words, ast.Constant):
                yield from str(words.value).split()
            continue
        else:
            continue
        for element in elements:
            if isinstance(element, ast.JoinedStr) and element.values:
                element = element.values[-1]  # f"{DOMAIN}.Name"
            if isinstance(element, ast.Constant) and isinstance(element.value, str):
                yield element.value


def name_tables() -> Places:
    """Tables of names of operations: values assigned at the top of a module with three literals or
    more that are such names, with or without their domains, and no more that are none."""
    tables = []
    for module in written():
        for target, value in assignments(tree(module).body):
            strings = [string.rpartition(".")[2] for string in _strings(value)]
            count = sum(string in operation_names() for string in strings)
            if count >= 3 and 2 * count >= len(strings):
                tables.append(place(module, target, f"{target.id}, {count} names"))
    return tables


def name_tables_in_passes() -> Places:
    """Of ``name_tables``, those in ``passes/``, which are traits that an operation should have."""
    return [table for table in name_tables() if table.startswith("passes.")]


def time_constants() -> Places:
    """Names of modules and classes in capitals that end in ``_S``, ``_MS``, ``_US`` or ``_NS``
    (``_PER_S`` among them), and are assigned numbers or tables of numbers."""
    return [place(module, target, target.id) for module, target in _times()]


def files_of_time_constants() -> Places:
    """Modules with ``time_constants``."""
    return sorted({module for module, _ in _times()})


def _times() -> Iterator[tuple[str, ast.Name]]:
    for module in written():
        if "S = " not in text(module) and "S, " not in text(module) and "S: " not in text(module):
            continue
        classes = [node.body for node in tree(module).body if isinstance(node, ast.ClassDef)]
        for target, value in chain(*map(assignments, (tree(module).body, *classes))):
            numbers = (x.value for x in ast.walk(value) if isinstance(x, ast.Constant))
            if _TIME.search(target.id) and any(type(x) in (int, float) for x in numbers):
                yield module, target


def passes_outside_pipeline() -> Places:
    """Calls, where graphs are compiled or run, of functions of ``passes/`` that take a graph first:
    they transform it, and the pipeline does not see that. Its own functions do not count."""
    places = []
    for module in written():
        if top(module) not in COMPILING or "penstock.passes." not in text(module):
            continue
        own = _names_from(module, "passes.")
        for node in nodes(module):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", "")
            if name in own and _transforms(*own[name]):
                places.append(place(module, node, own[name][1]))
            maker = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(maker, ast.Call) and getattr(maker.func, "id", "") in own:
                places.append(place(module, node, ast.unparse(node.func)))  # Pass().run(...)
    by_string = [s for s in all_string_imports() if top(s.module) in COMPILING]
    paths = [(s, s.path.removeprefix(f"{PACKAGE}.").rpartition(".")) for s in by_string]
    transforms = [s for s, (home, _, name) in paths if _transforms(home, name)]
    return places + [f"{s.module}, line {s.line}: {s.path}" for s in transforms]


def _names_from(module: str, folder: str) -> dict[str, tuple[str, str]]:
    """What ``module`` imports from modules whose names begin with ``folder``: the module and the
    name there, by the name here."""
    names = {}
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = node.module.removeprefix(f"{PACKAGE}.")
            if home.startswith(folder) and home != node.module:
                names.update({a.asname or a.name: (home, a.name) for a in node.names})
    return names


@cache
def _transforms(home: str, name: str) -> bool:
    if top(home) != "passes" or home not in modules() or name in ENTRY_POINTS:
        return False
    for node in tree(home).body:
        if isinstance(node, Function) and node.name == name and node.args.args:
            annotation = node.args.args[0].annotation
            return annotation is not None and ast.unparse(annotation) == "Graph"
    return False


def calls_of_infer_types() -> Places:
    """Calls of ``infer_types`` where graphs are compiled or run."""
    return [
        place(module, node)
        for module in written()
        if top(module) in COMPILING and "infer_types" in text(module)
        for node in nodes(module)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "infer_types"
    ]


def untested_modules() -> Places:
    """Modules ``a/b.py``, but ``__init__`` and ``__main__``, without ``tests/a/test_b.py``."""
    untested = []
    for module in written():
        path = modules()[module]
        test = TESTS / path.relative_to(SOURCE).with_name(f"test_{path.name.lstrip('_')}")
        if not path.stem.startswith("__") and not test.exists():
            untested.append(module)
    return untested


def session_members() -> Places:
    """Public methods, properties and attributes of the class ``Session``."""
    module, session = class_of_name("Session")
    methods = [(node.name, node) for node in session.body if isinstance(node, Function)]
    members = methods + [(target.id, target) for target, _ in assignments(session.body)]
    places = {n: place(module, node, n) for n, node in members if not n.startswith("_")}
    return list(places.values())


def environment_variables() -> Places:
    """Names of environment variables of the package."""
    names: dict[str, str] = {}
    for module in written():
        if f"{PACKAGE.upper()}_" in text(module):
            strings = [node for node in nodes(module) if isinstance(node, ast.Constant)]
            for node in strings:
                if isinstance(node.value, str) and _ENVIRONMENT.fullmatch(node.value):
                    names.setdefault(node.value, place(module, node, node.value))
    return list(names.values())


def seconds_functions() -> Places:
    """Functions of ``backends/`` that estimate times: their names end in ``seconds``."""
    return [
        place(module, function, function.name)
        for module, function in functions()
        if top(module) == "backends" and function.name.endswith("seconds")
    ]


FIGURES: dict[str, Callable[[], Places]] = {
    **{
        figure.__name__: figure
        for figure in (
            string_imports,
            tabled_imports,
            backend_members,
            backend_lookups,
            kernel_fields,
            kernel_facets,
            name_tables,
            name_tables_in_passes,
            time_constants,
            files_of_time_constants,
            seconds_functions,
            passes_outside_pipeline,
            calls_of_infer_types,
            tuple_splats,
            untested_modules,
            session_members,
            environment_variables,
            any_in_signatures,
            functions_over_6_parameters,
            classes_over_20_attributes,
        )
    },
    "native_call_fields": partial(fields, "NativeCall"),
    "pass_context_fields": partial(fields, "PassContext"),
    "compile_context_fields": partial(fields, "CompileContext"),
    "compile_options": partial(fields, "CompileOptions"),
}
"""The functions that list the places of each figure, by its name"""
