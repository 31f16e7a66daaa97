"""``penstock check | plan``: look at a model without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.cli.base import (
    EXECUTOR,
    MODEL,
    SHAPES,
    SIGNATURE,
    all_shapes,
    chosen,
    command,
    compile_option,
    planner_option,
    show_table,
)
from penstock.errors import InvalidInput, InvalidModel, Unsupported
from penstock.frontends.common.model_files import open_path
from penstock.frontends.load import load, load_text
from penstock.ir.describe import format_bytes
from penstock.ir.graph import Graph, Model, clone
from penstock.passes.context import Pass
from penstock.passes.pipeline import PASSES
from penstock.session.session import Session, compile

# check


def _show_check(result: Mapping[str, Any]) -> None:
    for problem in result["problems"]:
        click.echo(f"invalid: {problem}")
    for operation in result["unsupported"]:
        click.echo(f"unsupported: {operation}")
    if result["ok"]:
        click.echo("valid, and every operation is supported")


@command(_show_check)
@MODEL
def check(model: str) -> dict[str, Any]:
    """Verify a model and report everything that is wrong with it."""
    result: dict[str, Any] = {"ok": True, "problems": [], "unsupported": []}
    try:
        loaded = load(model)
        if loaded.artifact is not None:
            loaded.artifact.check()
        compile(loaded)
    except InvalidModel as error:
        result |= {"ok": False, "problems": list(error.problems)}
    except Unsupported as error:
        result |= {"ok": False, "unsupported": [str(operation) for operation in error.operations]}
    return result


# plan


def _show_plan(result: Mapping[str, Any]) -> None:
    if "text" in result:
        click.echo(result["text"], nl=False)
        return
    if "arena_bytes" in result:
        rows = []
        for name, size in result["arena_bytes"].items():
            bound = result["arena_lower_bound"][name]
            ratio = f"{size / (bound or 1):.3f}"
            rows.append((name, format_bytes(size), format_bytes(bound), ratio))
        show_table(("planner", "arena", "lower bound", "ratio"), rows)
        return
    workers = result["workers"]
    click.echo(f"serial         {result['serial'] * 1e3:.3f} ms")
    click.echo(f"makespan       {result['makespan'] * 1e3:.3f} ms on {workers} workers")
    click.echo(f"critical path  {result['critical_path'] * 1e3:.3f} ms")
    click.echo(f"bound          {result['bound'] * 1e3:.3f} ms: no schedule is shorter")
    click.echo("by what penstock profile has measured on this machine; the rest is estimated")


@command(_show_plan)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "--from",
    "text_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE.txt",
    help="Plan the graph that this file has in text form, as --after prints it, instead of MODEL.",
)
@SHAPES
@SIGNATURE
@click.option(
    "--after",
    type=click.Choice([*PASSES]),
    metavar="PASS",
    help="Print the graph as this compiler pass leaves it, in text form, instead of the plan.",
)
@click.option(
    "--max-elements",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --after: cut constants of more than N elements short. --from refuses such a text.",
)
@click.option("--source", is_flag=True, help="The generated program instead of the plan.")
@EXECUTOR
@planner_option("all", note=' "all": compare the arenas of all.')
@click.option("--streams", is_flag=True, help="The plan on streams, with the time line simulated.")
@compile_option("max_streams", type=click.IntRange(min=1))
@click.option("--svg", type=click.Path(path_type=Path), help="File to draw the streams into.")
@click.option(
    "--simulate",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the simulated time of the plan on N workers, instead of the plan.",
)
def plan(
    model: Path | None,
    text_file: Path | None,
    shapes: Sequence[str],
    signature: str | None,
    after: str | None,
    max_elements: int | None,
    source: bool,
    executor: str | None,
    planner: str | None,
    streams: bool,
    max_streams: int | None,
    svg: Path | None,
    simulate: int | None,
) -> dict[str, Any]:
    """How a model will run: its steps and their memory, or the generated program, its streams, a
    forecast, or the arenas of all memory planners; or its graph after a compiler pass."""
    from penstock.inspect.gantt import draw_charts, format_charts
    from penstock.textual.printer import format_graph

    if model is not None and text_file is None:
        loaded = load(model, signature=signature)
    elif text_file is not None and model is None:
        loaded = _read_text(text_file)
    else:
        raise click.UsageError("name either a MODEL or a text file with --from")
    compiled = partial(
        compile,
        loaded,
        shapes=all_shapes(loaded, shapes),
        **chosen(executor=executor, max_streams=max_streams if executor == "streams" else None),
    )
    if after is not None:
        graph = _graph_after(after, compiled)
        return {"pass": after, "text": format_graph(graph, max_elements) + "\n"}
    if planner == "all":
        arenas = {name: compiled(memory_planner=name).latest.arena_plan for name in MEMORY_PLANNERS}
        return {
            "arena_bytes": {name: a.size if a else 0 for name, a in arenas.items()},
            "arena_lower_bound": {name: a.lower_bound if a else 0 for name, a in arenas.items()},
        }
    session = compiled(**chosen(memory_planner=planner))
    if simulate is not None:
        return asdict(session.forecast(simulate))
    if svg is not None:
        svg.write_text(draw_charts(session.schedule(max_streams)), encoding="utf-8")
    if streams or svg is not None:
        charts = session.schedule(max_streams)
        return {"text": format_charts(charts), "blocks": [asdict(chart) for chart in charts]}
    return {"text": session.source if source else session.explain()}


def _graph_after(name: str, compiled: Callable[..., Session]) -> Graph:
    """The graph as the pass ``name`` leaves it when it runs for the last time."""
    snapshots: list[Graph] = []

    def keep(pass_: Pass, graph: Graph) -> None:
        if pass_.name == name:
            snapshots[:] = [clone(graph)]  # later passes change the graph in place

    compiled(after_pass=keep)
    if not snapshots:
        raise InvalidInput(
            f"pass {name} did not run: the executor of frames runs every node as it is"
        )
    return snapshots[0]


def _read_text(path: Path) -> Model:
    """The model that a file has in text form, verified and sorted as ``load`` does."""
    try:
        with open_path(path) as file:
            return load_text(file.read().decode())
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{path} is not a text file: {error}") from error
    except InvalidModel as error:
        raise InvalidModel(f"{path}: {error}") from error
