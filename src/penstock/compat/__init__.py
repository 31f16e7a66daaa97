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
from importlib.machinery import PathFinder
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
    for module, own in modules.items():
        if sys.modules.get(module, own) is not own:
            raise RuntimeError(
                f"install({name!r}): {module} is imported already; call it before anything "
                "imports that package"
            )
    if name not in sys.modules:
        modules = _beside_installed(name, modules)
    sys.modules.update(modules)


def _own_modules(name: str) -> dict[str, ModuleType]:
    """The modules here, by their names in the package."""
    package = import_module(f"penstock.compat.{_FOLDERS[name]}")
    assert package.__file__ is not None
    modules = {}
    folder = Path(package.__file__).parent
    for path in sorted(folder.rglob("*.py")):  # not by __path__, which may have more
        parts = path.relative_to(folder).with_suffix("").parts
        inner = ".".join(["", *parts]).removesuffix(".__init__")
        modules[name + inner] = import_module(package.__name__ + inner)
    return modules


def _beside_installed(name: str, modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Let packages here look for modules of the package that is installed, if it is. The modules
    that stand in its place are returned."""
    spec = PathFinder.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        return modules
    kept = {key: own for key, own in modules.items() if not key.startswith(_FALLBACKS)}
    for key, own in kept.items():
        if hasattr(own, "__path__"):
            parts = key.split(".")[1:]
            theirs = [os.path.join(folder, *parts) for folder in folders]
            own.__path__ = [*theirs, *own.__path__]
    return kept


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
