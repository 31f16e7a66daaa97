"""The interfaces of other runtimes, on top of Penstock's sessions.

``import penstock.compat.onnxruntime as ort`` is the one line that a program changes. A package that
cannot be changed, because it imports the other runtime itself, is served by ``install``::

    import penstock.compat

    penstock.compat.install("onnxruntime")
    import rapidocr  # imports onnxruntime, and gets Penstock
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

# The folder here that has the interface of each package.
_FOLDERS = {
    "onnxruntime": "onnxruntime",
    "ai_edge_litert": "ai_edge_litert",
    "tflite_runtime": "ai_edge_litert",
}
_TENSORFLOW = "tensorflow.lite"
# Written in Python alone: a package that is installed has more of it.
_FALLBACKS = ("onnxruntime.transformers",)


def install(name: str) -> None:
    """Let ``import NAME`` give Penstock's implementation of that package in this process.

    Where the package is installed, its own modules that are written in Python alone, as
    ``onnxruntime.quantization``, can be imported as before, and run models on Penstock. Raises
    ``ValueError`` for another name, and ``RuntimeError`` if the real package is imported already:
    parts of a program would have the one, and parts the other.

    Args:
        name: "onnxruntime", "ai_edge_litert", "tflite_runtime", or "tensorflow.lite" for its
            ``Interpreter``, with the rest of TensorFlow as it is.
    """
    if name == _TENSORFLOW:
        _install_in_tensorflow()
        return
    if name not in _FOLDERS:
        known = ", ".join(map(repr, [*_FOLDERS, _TENSORFLOW]))
        raise ValueError(f"install({name!r}): there is {known}")
    modules = _own_modules(name)
    loaded = {key: sys.modules[key] for key in modules if key in sys.modules}
    for key, module in loaded.items():
        if getattr(module, "__file__", None) != modules[key].__file__:
            raise RuntimeError(
                f"install({name!r}): {key} is imported already; call it before anything imports "
                "that package"
            )
    if not loaded:
        sys.modules.update(_aliases(name, modules))


def _own_modules(name: str) -> dict[str, ModuleType]:
    """The modules here, by their names in the package."""
    package = import_module(f"penstock.compat.{_FOLDERS[name]}")
    assert package.__file__ is not None
    modules = {}
    folder = Path(package.__file__).parent
    # Sorted, a package comes before its modules, which become attributes of it.
    for path in sorted(folder.rglob("*.py")):  # not by __path__, which may have more
        parts = path.relative_to(folder).with_suffix("").parts
        inner = ".".join(["", *parts]).removesuffix(".__init__")
        modules[name + inner] = import_module(package.__name__ + inner)
    return modules


def _aliases(name: str, own: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """The modules that stand in the place of a package. Packages among them are modules of that
    name, so that ``from onnxruntime import quantization`` and ``import onnxruntime.quantization``
    are the same; they look for modules of the package that is installed, too."""
    spec = PathFinder.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    aliases = {}
    for key, module in own.items():
        if folders and key.startswith(_FALLBACKS):
            continue
        if hasattr(module, "__path__"):
            parts = key.split(".")[1:]
            paths = [os.path.join(folder, *parts) for folder in folders] + list(module.__path__)
            module = _package(key, module, paths)
        aliases[key] = module
        parent, _, child = key.rpartition(".")
        if parent in aliases:
            setattr(aliases[parent], child, module)
    return aliases


def _package(key: str, own: ModuleType, paths: list[str]) -> ModuleType:
    """A package with the contents of another, which looks for its modules in these folders."""
    spec = ModuleSpec(key, None, origin=own.__file__, is_package=True)
    spec.submodule_search_locations = paths
    package = module_from_spec(spec)
    # Imports go by these, which must be those of the alias.
    kept = ("__name__", "__package__", "__spec__", "__path__", "__loader__")
    vars(package).update({name: x for name, x in vars(own).items() if name not in kept})
    return package


def _install_in_tensorflow() -> None:
    """Put the interpreter into the place of TensorFlow's."""
    from penstock.compat.ai_edge_litert import interpreter

    try:
        places = [
            import_module("tensorflow").lite,
            import_module("tensorflow.lite.python.interpreter"),
        ]
    except ImportError as error:
        raise RuntimeError(
            f"install({_TENSORFLOW!r}): TensorFlow is not installed ({error}); import "
            "penstock.compat.ai_edge_litert.interpreter instead"
        ) from error
    for place in places:
        place.Interpreter = interpreter.Interpreter
        place.OpResolverType = interpreter.OpResolverType
        place.load_delegate = interpreter.load_delegate
    places[0].experimental.load_delegate = interpreter.load_delegate
    places[0].experimental.OpResolverType = interpreter.OpResolverType
