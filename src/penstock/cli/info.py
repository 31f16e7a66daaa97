"""``penstock info``: what the file of a model says; with ``--plan``, also how it will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
import numpy as np

from penstock.backends.registry import BACKENDS, describe
from penstock.cli.base import MODEL, SHAPES, SIGNATURE, all_shapes, command, show_table
from penstock.errors import InvalidInput
from penstock.frontends.load import load
from penstock.ir.describe import format_bytes
from penstock.ir.graph import Graph, Model


def _show_info(result: Mapping[str, Any]) -> None:
    click.echo(f"model       {result['model']}")
    plan = result.get("plan")
    for title, ports in (("inputs", result["inputs"]), ("outputs", result["outputs"])):
        click.echo(title)
        for name in ports:
            declared = f": {ports[name]}" if title == "inputs" else ""
            here = f", here {plan[title][name]}" if plan else ""
            click.echo(f"  {name}{declared}{here}")
    for title, lines in result["structure"].items():
        click.echo("\n  ".join([title, *lines]))
    parameters = f"{result['parameters']:,} ({format_bytes(result['parameter_bytes'])})"
    click.echo(f"parameters  {parameters}")
    for name, what in result["backends"].items():
        click.echo(f"{name:<11} {what}")
    click.echo(f"nodes       {result['nodes']}")
    show_table(("operation", "nodes"), [(k, str(v)) for k, v in result["operations"].items()])
    if "why" in result:
        click.echo(f"no plan: {result['why']}")
    if not plan:
        return
    click.echo(f"steps       {plan['steps']}")
    click.echo(f"work        {plan['flops'] / 1e6:,.1f} MFLOP a run")
    arena, bound = format_bytes(plan["arena_bytes"]), format_bytes(plan["arena_lower_bound"])
    click.echo(f"arena       {arena} (lower bound {bound})")
    click.echo(f"constants   {format_bytes(plan['constant_bytes'])}")


@command(_show_info)
@MODEL
@SHAPES
@SIGNATURE
@click.option("--plan", "planned", is_flag=True, help="Also compile it: its work and memory.")
def info(model: str, shapes: Sequence[str], signature: str | None, planned: bool) -> dict[str, Any]:
    """Inputs, outputs, parts, operations and parameters of a model, and what backends there are;
    with --plan, or a shape to plan for, also its steps, work and memory."""
    loaded = load(model, signature=signature)
    graph = loaded.graph
    constants = _constants(graph)
    result: dict[str, Any] = {
        "model": str(model),
        "metadata": loaded.metadata,
        "structure": loaded.structure,
        "inputs": {v.name: str(v.type) for v in graph.inputs},
        "outputs": [v.name for v in graph.outputs],
        "nodes": sum(1 for _ in graph.walk()),
        "operations": dict(Counter(n.op.full_name for n in graph.walk()).most_common()),
        "parameters": sum(c.size for c in constants),
        "parameter_bytes": sum(c.nbytes for c in constants),
        "backends": {name: describe(name) for name in BACKENDS},
    }
    return {**result, **_plan_of(loaded, shapes)} if planned or shapes else result


def _plan_of(model: Model, shapes: Sequence[str]) -> dict[str, Any]:
    """The plan of a model for these shapes; why there is none, if it must know more of them."""
    from penstock.ops.work_estimate import flops
    from penstock.session.session import compile

    try:
        executor = compile(model, shapes=all_shapes(model, shapes)).latest
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
        "steps": sum(1 for _ in plan.walk()),
        "flops": sum(flops(step.node) for step in plan.walk()),
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
