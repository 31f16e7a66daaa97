"""``penstock check | plan``: look at a model without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.cli.base import (
    MODEL,
    SIGNATURE,
    CompileArguments,
    command,
    count_option,
    planner_option,
    read_model,
    show_table,
)
from penstock.cli.cluster import cluster_options, describe_forecast, show_forecast
from penstock.cli.options import MAX_STREAMS, changed, compile_options, file_option, gathered
from penstock.cli.shapes import SHAPES, all_shapes
from penstock.cluster.simulated import SimulatedCluster
from penstock.core.errors import InvalidInput, InvalidModel, Unsupported
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import dataclass
from penstock.core.types import JsonObject
from penstock.frontends.common.model_files import open_path
from penstock.frontends.load import load_text
from penstock.ir.describe import format_bytes
from penstock.ir.graph import Graph, Model, clone
from penstock.passes.context import Pass
from penstock.passes.pipeline import LOWER, OPTIMIZE, PASSES, STRUCTURE
from penstock.session.session import Session, compile

# check


def _show_check(result: JsonObject) -> None:
    for problem in result["problems"]:
        click.echo(f"invalid: {problem}")
    for operation in result["unsupported"]:
        click.echo(f"unsupported: {operation}")
    if result["ok"]:
        click.echo("valid, and every operation is supported")


@command(_show_check)
@MODEL
@SIGNATURE
@compile_options()
def check(model: str, signature: str | None, options: CompileArguments) -> JsonObject:
    """Verify a model and report everything that is wrong with it, or that no backend can run."""
    result: dict[str, Any] = {"ok": True, "problems": [], "unsupported": []}
    try:
        loaded, options = read_model(model, signature, options)
        if loaded.artifact is not None:
            loaded.artifact.check()
        compile(loaded, **options)
    except InvalidModel as error:
        result |= {"ok": False, "problems": list(error.problems)}
    except Unsupported as error:
        result |= {"ok": False, "unsupported": [str(operation) for operation in error.operations]}
    return result


# plan


def _show_plan(result: JsonObject) -> None:
    for name, note in result["assumed"].items():
        click.echo(f"input {name}: {note}; --shape names others", err=True)  # not part of a text
    if "text" in result:
        click.echo(result["text"], nl=False)
        return
    if "arena_bytes" in result:
        rows = []
        for name, size in result["arena_bytes"].items():
            bound = result["arena_lower_bound"][name]
            # A model without values in the arena has a bound of 0.
            ratio = f"{size / (bound or 1):.3f}"
            rows.append((name, format_bytes(size), format_bytes(bound), ratio))
        show_table(("planner", "arena", "lower bound", "ratio"), rows)
        return
    if "traffic" in result:
        show_forecast(result)
        return
    workers = result["workers"]
    click.echo(f"serial         {result['serial'] * 1e3:.3f} ms")
    click.echo(f"makespan       {result['makespan'] * 1e3:.3f} ms on {workers} workers")
    click.echo(f"critical path  {result['critical_path'] * 1e3:.3f} ms")
    click.echo(f"bound          {result['bound'] * 1e3:.3f} ms: no schedule is shorter")
    measured, kernels = result["measured"], result["kernels"]
    click.echo(f"costs: {measured} of {kernels} measured on this machine, the others estimated")


@dataclass(frozen=True)
class _Question:
    """The question that ``penstock plan`` answers in place of the plan, if any."""

    after: str | None
    max_elements: int | None
    source: bool
    planner: str | None
    reasons: bool
    streams: bool
    max_streams: int | None
    svg: Path | None
    simulate: int | None
    cluster: SimulatedCluster | None

    @property
    def draws(self) -> bool:
        """Whether it is about streams."""
        return self.streams or self.svg is not None

    def check(self, options: Mapping[str, object]) -> None:
        """Refuse several questions at once, and options that are for a question not asked."""
        asked = {
            "--after": self.after is not None,
            "--source": self.source,
            "--planner all": self.planner == "all",
            "--streams": self.draws,
            "--simulate": self.simulate is not None,
            "--cluster": self.cluster is not None,
            "--reasons": self.reasons,
        }
        names = [name for name, is_given in asked.items() if is_given]
        if len(names) > 1:
            raise click.UsageError(f"{' and '.join(names)} ask for different things: name one")
        if self.max_elements is not None and self.after is None:
            raise click.UsageError("--max-elements is for --after")
        if self.max_streams is not None and options.get("executor") != "streams" and not self.draws:
            raise click.UsageError("--max-streams is for --streams, or --executor streams")


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
@count_option(
    "--max-elements",
    least=0,
    metavar="N",
    help="With --after: cut constants of more than N elements short. --from refuses such a text.",
)
@click.option("--source", is_flag=True, help="The generated program instead of the plan.")
@compile_options("memory_planner", "max_streams")
@MAX_STREAMS
@planner_option("all", note=' "all": compare the arenas of all.')
@click.option(
    "--reasons",
    is_flag=True,
    help="Also say why each step is on its backend, and whether a mask's rows are left out.",
)
@click.option("--streams", is_flag=True, help="The plan on streams, with the time line simulated.")
@file_option("--svg", help="File to draw the streams into.")
@count_option(
    "--simulate",
    metavar="N",
    help="Show the simulated time of the plan on N workers, instead of the plan.",
)
@cluster_options
@gathered("question", _Question)
def plan(
    model: Path | None,
    text_file: Path | None,
    shapes: Sequence[str],
    signature: str | None,
    options: CompileArguments,
    question: _Question,
) -> JsonObject:
    """Show how a model will run: its steps and their memory, or the generated program, its streams,
    a forecast for one machine or for a cluster, or the arenas of all memory planners; or its graph
    after a compiler pass."""
    from penstock.textual.printer import format_graph

    loaded, options = _loaded(model, text_file, signature, options)
    question.check(options)
    if options.get("executor") == "streams" and question.max_streams is not None:
        options = changed(options, {"max_streams": question.max_streams})
    assumed: dict[str, str] = {}
    dims = all_shapes(loaded, shapes, assumed)
    if question.cluster is not None:
        spread = compile(loaded, cluster=question.cluster, **options)
        return {"assumed": assumed, **describe_forecast(spread, question.cluster, dims)}

    def compiled(**expert: object) -> Session:
        return compile(loaded, shapes=dims, **changed(options, expert))

    if question.after is not None:
        graphs = _graphs_after(question.after, compiled)
        most = question.max_elements
        text = "\n".join([format_graph(graph, most) + "\n" for graph in graphs])
        return {"assumed": assumed, "pass": question.after, "text": text}
    if question.planner == "all":
        return {"assumed": assumed, **_arenas(compiled)}
    planner = {} if question.planner is None else {"memory_planner": question.planner}
    session = compiled(**planner)
    if question.simulate is not None:
        return {"assumed": assumed, **asdict(session.inspect.forecast(question.simulate))}
    if question.draws:
        charts = session.inspect.schedule(question.max_streams)
        if question.svg is not None:
            question.svg.write_text(charts.to_svg(), encoding="utf-8")
        blocks = [asdict(chart) for chart in charts]
        return {"assumed": assumed, "text": f"{charts}\n", "blocks": blocks}
    if question.source:
        return {"assumed": assumed, "text": session.source}
    text = session.explain(reasons=question.reasons)
    return {"assumed": assumed, "text": text, "plan": session.inspect.describe()}


def _loaded(
    model: Path | None, text_file: Path | None, signature: str | None, options: CompileArguments
) -> tuple[Model, Mapping[str, Any]]:
    """The model at a path, or that of a text file, and the options of compiling it."""
    if model is not None and text_file is None:
        return read_model(model, signature, options)
    if text_file is not None and model is None:
        if signature is not None:
            raise click.UsageError("--signature is for a MODEL: the text of a graph has none")
        return _read_text(text_file, options.get("limits") or DEFAULT_LIMITS), options
    raise click.UsageError("name either a MODEL or a text file with --from")


def _arenas(compiled: Callable[..., Session]) -> JsonObject:
    """The arenas that all memory planners lay out."""
    arenas = {
        name: compiled(memory_planner=name).inspect.executor.arena_plan for name in MEMORY_PLANNERS
    }
    return {
        "arena_bytes": {name: a.size if a else 0 for name, a in arenas.items()},
        "arena_lower_bound": {name: a.lower_bound if a else 0 for name, a in arenas.items()},
    }


def _graphs_after(name: str, compiled: Callable[..., Session]) -> list[Graph]:
    """The graph as the pass ``name`` leaves it when it runs for the last time: of a graph that was
    partitioned, each part."""
    snapshots: list[Graph] = []
    runs_on = False  # on the next part: no other pass has run since

    def keep(pass_: Pass, graph: Graph) -> None:
        nonlocal runs_on
        if pass_.name == name:
            # Later passes change the graph in place.
            snapshots[:] = [*(snapshots if runs_on else ()), clone(graph)]
        runs_on = pass_.name == name

    compiled(after_pass=keep)
    if not snapshots:
        of_blocks = {step.name for step in (*STRUCTURE, *OPTIMIZE, *LOWER)}
        reason = (
            "it is for graphs with frames, and for --executor frames"
            if name not in of_blocks
            else "the executor of frames runs every node as it is"
        )
        raise InvalidInput(f"pass {name} did not run: {reason}")
    return snapshots


def _read_text(path: Path, limits: Limits) -> Model:
    """The model that a file has in text form, verified and sorted as ``load`` does."""
    try:
        with open_path(path) as file:
            return load_text(file.read().decode(), limits)
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{path} is not a text file: {error}") from error
    except InvalidModel as error:
        raise InvalidModel(f"{path}: {error}") from error
