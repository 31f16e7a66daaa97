"""``penstock bench``: the time of a model's runs, by executor and number of threads, and that of
other runtimes beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product

import click
import numpy as np

from penstock.cli.base import CompileArguments, command, count_option, show_table
from penstock.cli.bench_text import TextTrial, show_text_bench
from penstock.cli.options import compile_options, gathered, imported_modules
from penstock.cli.run import ModelInputs, model_and_inputs
from penstock.cli.shapes import show_assumed
from penstock.compiler.options import EXECUTORS
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, NamedValues, RunValue
from penstock.executors.feeds import convert
from penstock.host.threads import core_budget
from penstock.ir.graph import Model
from penstock.peers.comparison import Comparison, compare_outputs
from penstock.peers.engines import PEERS, PENSTOCK, EngineJob
from penstock.peers.process import engine_processes
from penstock.peers.timing import describe_times, time_runs
from penstock.session.session import compile

_WARM_UP_RUNS = 3
_TURNS = 5

_COLUMNS = (
    ("runtime", "engine", ""),
    ("executor", "executor", ""),
    ("effective", "effective", ""),
    ("threads", "threads", ""),
    ("clients", "clients", ""),
    ("prepare", "prepare_ms", ".1f"),
    ("first", "first_ms", ".2f"),
    ("mean", "mean_ms", ".3f"),
    ("median", "median_ms", ".3f"),
    ("p95", "p95_ms", ".3f"),
    ("p99", "p99_ms", ".3f"),
    ("min", "min_ms", ".3f"),
    ("max", "max_ms", ".3f"),
    ("runs/s", "runs_per_s", ".0f"),
    ("ratio", "ratio", ".2f"),
    ("outputs", "relative", ".1e"),
)  # title, key and format
_OF_PEERS = ("runtime", "ratio", "outputs")


def _show_bench(result: JsonObject) -> None:
    if "generate" in result:
        show_text_bench(result)
        return
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    show_assumed(result)
    rows, turns = result["rows"], result["turns"]
    several = any(row["clients"] > 1 for row in rows)
    columns = [
        column
        for column in _COLUMNS
        if (several or column[0] != "clients") and (turns or column[0] not in _OF_PEERS)
    ]
    cells = [[_cell(row.get(key), form) for _, key, form in columns] for row in rows]
    show_table([title for title, _, _ in columns], cells)
    click.echo("times in ms; p95 and p99: the 95th and 99th percentile")
    if turns:
        click.echo(
            f"ratio: Penstock's median over this runtime's, the median of {turns} turns: below 1 "
            "Penstock is faster"
        )
        click.echo("outputs: the largest difference, as a share of the largest element")


def _cell(value: float | str | None, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return format(value, form)


@dataclass(frozen=True)
class _Trials:
    """The combinations that are timed, each for this number of ``seconds``; with runtimes
    ``against`` which they are timed, in ``turns``."""

    executors: Sequence[str]
    threads: Sequence[int]
    clients: Sequence[int]
    seconds: float
    against: Sequence[str]
    turns: int | None

    def __iter__(self) -> Iterator[tuple[str | None, int, int]]:
        """The executor (None: that of the options), the threads and the clients of each."""
        counts = sorted(set(self.threads) or {1, core_budget()})
        return product(self.executors or (None,), counts, self.clients or (1,))

    def check(self) -> None:
        """Refuse turns without runtimes to take them with."""
        if self.turns is not None and not self.against:
            raise click.UsageError("--turns is for --against")


@command(_show_bench)
@model_and_inputs
@click.option(
    "--executor",
    "-e",
    "executors",
    multiple=True,
    type=click.Choice(EXECUTORS),
    help="Executor to use; may be repeated. Default: auto.",
)
@compile_options("executor", "threads")
@count_option(
    "--threads",
    "-t",
    multiple=True,
    help="Cores that a run may use; may be repeated. Default: 1 and all.",
)
@count_option(
    "--clients",
    "-c",
    multiple=True,
    help="Threads that call the session concurrently; may be repeated. Default: 1.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds for which each combination runs, at least five times.",
)
@click.option(
    "--against",
    multiple=True,
    type=click.Choice(PEERS),
    help="Another runtime to time on the same model and inputs, if it is installed; may be "
    "repeated. Each runs in a process of its own, in turn with Penstock.",
)
@count_option(
    "--turns", help="With --against: turns into which the seconds of each are divided. Default: 5."
)
@count_option(
    "--generate",
    metavar="N",
    help="Time a decoder that generates texts of N tokens, one for each client.",
)
@count_option(
    "--prompt", metavar="N", help="With --generate: random tokens of each prompt. Default: 128."
)
@gathered("text", TextTrial)
@gathered("trials", _Trials)
def bench(
    source: ModelInputs, options: CompileArguments, trials: _Trials, text: TextTrial
) -> JsonObject:
    """Time a model: loading, preparing (compiling a plan for the inputs), the first run, and the
    mean, median, 95th and 99th percentiles, minimum and maximum of many runs.

    With --against, the same of other runtimes, whose preparing is all of loading the model, and the
    difference of their outputs. Inputs that are not given are random; an unknown first dim of
    theirs is 1.

    With --generate, the time to the first token and the tokens a second of texts that a decoder
    writes, whose steps all clients share.
    """
    trials.check()
    text.check()
    if text.generate is not None:
        cases = [(threads, clients) for _, threads, clients in trials]
        return text.measured(source.model, source.seed, cases, options)
    begin = time.perf_counter()
    loaded, options = source.read(options)
    load_ms = 1e3 * (time.perf_counter() - begin)
    with compile(loaded, **options) as session:
        feeds = source.feeds(session)
        # Lists are made arrays here, lest each run that is timed converts them anew.
        fed = {p.name: convert(p.name, feeds[p.name], p.type) for p in session.inputs}
        outputs = [port.name for port in session.outputs]
    feeds |= fed
    tensors = all(isinstance(value, np.ndarray) for value in fed.values())
    ahead = {"shapes": {name: value.shape for name, value in fed.items()}} if tensors else {}
    rows: list[JsonObject] = []
    for executor, count, clients in trials:
        chosen = {**options, **ahead, "threads": count}
        chosen |= {} if executor is None else {"executor": executor}
        if trials.against:
            chosen |= {} if source.signature is None else {"signature": source.signature}
            job = EngineJob(PENSTOCK, source.model, fed, count, chosen, imported_modules())
            rows += _measured_in_turn(job, clients, trials, outputs)
        else:
            rows.append(_measured(loaded, feeds, clients, trials.seconds, chosen))
    turns = (trials.turns or _TURNS) if trials.against else 0
    return {**source.describe(feeds), "load_ms": load_ms, "turns": turns, "rows": rows}


def _measured(
    model: Model, feeds: NamedValues, clients: int, seconds: float, options: CompileArguments
) -> JsonObject:
    """A row for a model that is compiled with these options."""
    begin = time.perf_counter()
    with compile(model, **options) as session:
        prepared = time.perf_counter()
        session.run(feeds)
        first = time.perf_counter()
        # Not counted: caches are cold, and the number of threads may be tried out.
        for _ in range(_WARM_UP_RUNS):
            session.run(feeds)
        times, elapsed = time_runs(lambda: session.run(feeds), clients, seconds)
        return {
            "executor": session.options.executor,
            "effective": session.effective.executor,
            "threads": options["threads"],
            "clients": clients,
            "prepare_ms": 1e3 * (prepared - begin),
            "first_ms": 1e3 * (first - prepared),
            **describe_times(times, elapsed),
        }


def _measured_in_turn(
    job: EngineJob, clients: int, trials: _Trials, outputs: Sequence[str]
) -> list[JsonObject]:
    """A row for a model on Penstock, as ``job`` says, and one for each of the other runtimes."""
    turns = trials.turns or _TURNS
    peers = [EngineJob(name, job.path, job.feeds, job.threads) for name in trials.against]
    rows = []
    with engine_processes([job, *peers]) as processes:
        firsts = [process.run() for process in processes]
        for process in processes:
            process.time(clients, 0)  # not counted, as above
        # In turn, so that a machine that slows down meanwhile does so for all runtimes alike.
        timed = [
            [process.time(clients, trials.seconds / turns) for process in processes]
            for _ in range(turns)
        ]
        effective = processes[0].describe()
    medians = [[statistics.median(times) for times, _ in turn] for turn in timed]
    for i, process in enumerate(processes):
        times = [seconds for turn in timed for seconds in turn[i][0]]
        row = {
            "engine": process.engine,
            "version": process.loaded.version,
            "executor": None if i else job.options.get("executor", "auto"),
            "effective": None if i else effective,
            "threads": job.threads,
            "clients": clients,
            "prepare_ms": 1e3 * process.loaded.load_seconds,
            "first_ms": 1e3 * firsts[i][1],
            **describe_times(times, sum(turn[i][1] for turn in timed)),
        }
        if i:
            # Of each turn by itself: what slows the machine down for a while does so to both in it.
            row["ratio"] = statistics.median([turn[0] / turn[i] for turn in medians])
            row["relative"] = _apart(outputs, firsts[0][0], firsts[i][0])
        rows.append(row)
    return rows


def _apart(
    names: Sequence[str], first: Sequence[RunValue], second: Sequence[RunValue]
) -> float | str:
    """The largest relative difference of outputs, as JSON can have it."""
    pairs = [dict(zip(names, values, strict=False)) for values in (first, second)]
    relative = Comparison(("", ""), tuple(compare_outputs(*pairs))).relative
    return relative if math.isfinite(relative) else "differ"
