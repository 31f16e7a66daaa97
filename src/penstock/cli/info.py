"""``penstock info``: what the file of a model says, with ``--plan`` also how it will run; without a
model, what Penstock has to work with on this machine."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import click
import numpy as np

from penstock.cli.base import SIGNATURE, CompileArguments, command, read_model, show_table
from penstock.cli.options import compile_options
from penstock.cli.shapes import SHAPES, all_shapes, show_assumed
from penstock.core import VERSION
from penstock.core.errors import InvalidInput, PenstockError, shortened
from penstock.core.types import JsonObject
from penstock.host.threads import core_budget
from penstock.ir.describe import format_bytes
from penstock.ir.graph import Graph, Model, clone

# Packages whose versions matter to a report of a fault.
_PACKAGES = ("numpy", "ml_dtypes", "onnx", "protobuf")

_MOST_TEXT = 1000
"""characters of metadata that are shown; ``--json`` has all"""

# Options that bound how the file is read.
_OF_READING = {"limits", "timeout"}


def _show_info(result: JsonObject) -> None:
    if "python" in result:
        _show_installation(result)
        return
    click.echo(f"model       {result['model']}")
    for name, text in result["about"].items():
        click.echo(f"{name:<11} {text}")
    for name, text in result["metadata"].items():
        # Files of language models have all tokens there.
        click.echo(f"metadata    {name}: {shortened(text, _MOST_TEXT)}")
    plan = result.get("plan")
    for title in ("inputs", "outputs"):
        click.echo(title)
        for name, declared in result[title].items():
            here = f", here {plan[title][name]}" if plan else ""
            click.echo(f"  {name}: {declared}{here}")
    for title, lines in result["structure"].items():
        click.echo("\n  ".join([title, *lines]))
    parameters = f"{result['parameters']:,} ({format_bytes(result['parameter_bytes'])})"
    click.echo(f"parameters  {parameters}")
    click.echo(f"nodes       {result['nodes']}")
    show_table(("operation", "nodes"), [(k, str(v)) for k, v in result["operations"].items()])
    if "why" in result:
        click.echo(f"no plan: {result['why']}")
    if not plan:
        return
    show_assumed(plan)
    click.echo(f"runs with   {plan['effective']}")
    click.echo(f"steps       {plan['steps']}")
    click.echo(f"work        {plan['flops'] / 1e6:,.1f} MFLOP a run")
    arena, bound = format_bytes(plan["arena_bytes"]), format_bytes(plan["arena_lower_bound"])
    click.echo(f"arena       {arena} (lower bound {bound})")
    click.echo(f"constants   {format_bytes(plan['constant_bytes'])}")


def _show_installation(result: JsonObject) -> None:
    facts = {
        name: result[name] for name in ("penstock", "python", "system", "processor", "threads")
    }
    for named in (facts, *map(result.get, ("backends", "packages", "folders", "environment"))):
        for name, fact in (named or {}).items():
            click.echo(f"{name:<15} {'not installed' if fact is None else fact}")
    for notice in result["notices"]:
        click.echo(f"notice: {notice}")


@command(_show_info)
@click.argument("model", type=click.Path(), required=False)
@SHAPES
@SIGNATURE
@click.option("--plan", "planned", is_flag=True, help="Also compile it: its work and memory.")
@compile_options()
def info(
    model: str | None,
    shapes: Sequence[str],
    signature: str | None,
    planned: bool,
    options: CompileArguments,
) -> JsonObject:
    """Inputs, outputs, parts, operations and parameters of a model; with --plan, or a shape to plan
    for, also its steps, work and memory. Without a model: versions, backends, instruction sets,
    threads and folders of this installation, for reports of faults."""
    if model is None:
        if shapes or signature or planned or options:
            raise click.UsageError("these options are for a MODEL: name one")
        return _installation()
    if options.keys() - _OF_READING and not (planned or shapes):
        raise click.UsageError("options of compiling are for --plan, or a --shape to plan for")
    loaded, options = read_model(model, signature, options)
    graph = loaded.graph
    constants = _constants(graph)
    result: dict[str, Any] = {
        "model": str(model),
        "about": loaded.about,
        "metadata": loaded.metadata,
        "signatures": list(loaded.signatures),
        "structure": loaded.structure,
        "inputs": {v.name: str(v.type) for v in graph.inputs},
        "outputs": _output_types(graph),
        "nodes": sum(1 for _ in graph.walk()),
        "operations": dict(Counter(n.op.full_name for n in graph.walk()).most_common()),
        "parameters": sum(c.size for c in constants),
        "parameter_bytes": sum(c.nbytes for c in constants),
    }
    return {**result, **_plan_of(loaded, shapes, options)} if planned or shapes else result


def _installation() -> JsonObject:
    """The facts that a report of a fault should have."""
    import os

    from penstock.backends.registry import BACKENDS, available, describe
    from penstock.session.compile_cache import folder_of
    from penstock.tuning.cost_table import cost_table

    versions = {name: _version(name) for name in _PACKAGES}
    slow = "the backend native is missing, so that many models run several times as slow"
    return {
        "penstock": VERSION,
        "python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": core_budget(),
        "backends": {name: describe(name) for name in BACKENDS},
        "packages": versions,
        "folders": {
            "saved sessions": folder_of(None) or "off",
            "costs": cost_table().path or "off",
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PENSTOCK_")},
        "notices": [] if "native" in available() else [slow],
    }


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output_types(graph: Graph) -> dict[str, str]:
    """The types of a graph's outputs by name, as far as they follow from those of its inputs."""
    from penstock.analysis.type_inference import infer_types

    # Types are inferred in place, and the result shows the graph as the file has it.
    copy = clone(graph)
    try:
        infer_types(copy)
    except PenstockError:  # compiling says what is wrong
        copy = graph
    names = [value.name for value in graph.outputs]
    return {n: str(v.type) for n, v in zip(names, copy.outputs, strict=True)}


def _plan_of(model: Model, shapes: Sequence[str], options: CompileArguments) -> JsonObject:
    """The plan of a model for these shapes; why there is none, if it must know more of them."""
    from penstock.session.session import compile

    assumed: dict[str, str] = {}
    try:
        session = compile(model, shapes=all_shapes(model, shapes, assumed), **options)
        executor = session.inspect.executor
    except InvalidInput as error:
        if shapes:
            raise
        return {"plan": None, "why": str(error)}
    plan, arena_plan = executor.table, executor.arena_plan
    outputs = [value.name for value in model.graph.outputs]
    figures = {
        "inputs": {plan.slots[i].name: str(plan.slots[i].type) for i in plan.inputs},
        "outputs": {
            name: str(plan.slots[i].type) for name, i in zip(outputs, plan.outputs, strict=True)
        },
        "assumed": assumed,
        "effective": session.effective.line(session.options),
        "steps": sum(1 for _ in plan.walk()),
        "flops": sum(plan.flops_of.values()),
        "arena_bytes": 0 if arena_plan is None else arena_plan.size,
        "arena_lower_bound": 0 if arena_plan is None else arena_plan.lower_bound,
        "constant_bytes": plan.constant_bytes,
    }
    return {"plan": figures}


def _constants(graph: Graph) -> Collection[np.ndarray]:
    """The constants that a graph reads, those of TensorFlow's Const nodes and the values that
    variables start with among them, each once."""
    arrays: list[Any] = []
    for node in graph.walk():
        arrays += getattr(node.attrs.get("store"), "initial", {}).values()
        arrays += [v.const for v in node.inputs if v is not None]
        arrays.append(node.attrs.get("value") if node.op.name == "Const" else None)
    return {id(x): x for x in arrays if isinstance(x, np.ndarray)}.values()
