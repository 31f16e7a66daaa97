"""Options for simulated clusters, ``penstock plan --cluster``, and their forecasts:
units on the command line, and what is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from penstock.cli.base import count_option, show_table
from penstock.cli.options import gathered
from penstock.cluster.simulated import MOST_WORKERS, SimulatedCluster
from penstock.core.types import JsonObject
from penstock.ir.describe import format_bytes
from penstock.session.session import Session
from penstock.tuning.worker_placement import DRIVER, OBJECTIVES, ClusterForecast

_BYTES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES |= {prefix + "i": 1024.0**i for i, prefix in enumerate("KMGT", 1)}
_UNITS: Mapping[str, Mapping[str, float]] = {
    "bandwidth": {
        **{f"{prefix}B/s": scale for prefix, scale in _BYTES.items()},
        **{f"{prefix}bit/s": scale / 8 for prefix, scale in _BYTES.items()},
    },
    "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}
_FORMS = {"bandwidth": "10GB/s, 400MB/s or 25Gbit/s", "latency": "50us, 0.2ms or 1e-4s"}
_AMOUNT = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)")
# Workers that are shown, those with the largest loads.
_MOST_ROWS = 20


def read_amount(kind: str, text: str) -> float:
    """A ``"bandwidth"`` in bytes per second, or a ``"latency"`` in seconds, with its unit. Raises
    ``ValueError`` that has the form."""
    match = _AMOUNT.fullmatch(text.strip())
    scale = _UNITS[kind].get(match[2]) if match else None
    try:
        amount = 0.0 if match is None or scale is None else float(match[1]) * scale
    # The pattern lets two points in a number pass.
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise ValueError(
            f"{text!r} is no {kind}: a number and its unit are needed, as in {_FORMS[kind]}"
        )
    return amount


def _amount(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else read_amount(str(parameter.name), text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_OPTIONS = (
    click.option(
        "--cluster",
        type=click.IntRange(1, MOST_WORKERS),
        metavar="N",
        help="Show what runs on N workers of one thread are expected to take, instead of the plan.",
    ),
    click.option("--bandwidth", metavar="RATE", callback=_amount, help="Of a link, as in 10GB/s."),
    click.option("--latency", metavar="TIME", callback=_amount, help="Of a message, as in 50us."),
    count_option(
        "--cores", help="Cores that all workers share, on one machine. Default: each has its own."
    ),
    click.option(
        "--cost",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="PROFILE.json",
        help="What nodes take, as penstock profile --threads 1 --json has it. Default: what was "
        "measured on this machine, or else estimated.",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        help="Place nodes for many runs at once (the default), or for one run.",
    ),
)


def cluster_options(function: Callable[..., object]) -> Callable[..., object]:
    """Give a command the options of a simulated cluster, which it takes as ``cluster``; None
    without ``--cluster``."""
    declared: Any = gathered("cluster", _simulated)(function)
    # Help lists first what was declared last.
    for option in reversed(_OPTIONS):
        declared = option(declared)
    return declared


def _simulated(
    cluster: int | None,
    bandwidth: float | None,
    latency: float | None,
    cores: int | None,
    cost: Path | None,
    objective: str | None,
) -> SimulatedCluster | None:
    """The cluster that the options describe; None without ``--cluster``."""
    if cluster is None:
        names = ("--bandwidth", "--latency", "--cores", "--cost", "--objective")
        values = (bandwidth, latency, cores, cost, objective)
        for name, value in zip(names, values, strict=True):
            if value is not None:
                raise click.UsageError(f"{name} is for --cluster")
        return None
    if bandwidth is None or latency is None:
        raise click.UsageError("--cluster needs --bandwidth and --latency")
    return SimulatedCluster(
        cluster,
        bandwidth=bandwidth,
        latency=latency,
        objective=objective or OBJECTIVES[0],
        profile=cost,
        cores=cores,
    )


def describe_forecast(
    session: Session, cluster: SimulatedCluster, shapes: Mapping[str, tuple[int, ...]]
) -> JsonObject:
    """A forecast of runs of a session, as JSON has it; times in seconds."""
    forecast = session.inspect.forecast_on_cluster(shapes)
    workers = [
        {
            "worker": i,
            "nodes": nodes,
            "computing": computing,
            "messages": load - computing,
            "load": load,
        }
        for i, (load, computing, nodes) in enumerate(
            zip(forecast.loads, forecast.computing, forecast.nodes, strict=True)
        )
        if load
    ]
    costs = cluster.costs
    result = {
        "workers": cluster.workers,
        "used": forecast.used,
        "objective": cluster.objective,
        "makespan": forecast.makespan,
        "serial": sum(forecast.computing),
        "interval": forecast.interval,
        "utilization": forecast.utilization,
        "bottleneck": _bottleneck(forecast),
        "traffic_bytes": sum(forecast.traffic.values()),
        "loads": workers,
        "traffic": [
            {"source": _name(source), "target": _name(target), "bytes": nbytes}
            for (source, target), nbytes in forecast.traffic.items()
        ],
        "profile": None if costs is None else costs.source,
    }
    if costs is not None and costs.threads > 1:
        result["note"] = (
            f"the profile is of kernels with {costs.threads} threads, and workers have one: "
            "profile with --threads 1"
        )
    return result


def _bottleneck(forecast: ClusterForecast) -> JsonObject:
    worker = forecast.bottleneck
    computing = forecast.computing[worker]
    if forecast.shared > forecast.loads[worker]:
        return {"worker": None, "bound_by": "cores", "load": forecast.shared}
    bound_by = "computing" if 2 * computing >= forecast.loads[worker] else "messages"
    return {"worker": worker, "bound_by": bound_by, "load": forecast.loads[worker]}


def _name(worker: int) -> int | str:
    return "driver" if worker == DRIVER else worker


def show_forecast(result: JsonObject) -> None:
    """Print a forecast for people."""
    bottleneck, interval = result["bottleneck"], result["interval"]
    click.echo(f"workers      {result['used']} of {result['workers']} have nodes")
    click.echo(f"serial       {result['serial'] * 1e3:.3f} ms, all nodes on one worker")
    click.echo(
        f"makespan     {result['makespan'] * 1e3:.3f} ms, one run from its feeds to its outputs"
    )
    click.echo(
        f"interval     {interval * 1e3:.3f} ms between the ends of runs, with many in flight"
        + (f": {1 / interval:.1f} a second" if interval else "")
    )
    click.echo(f"utilization  {result['utilization']:.1%} of the time of workers that have nodes")
    click.echo(f"traffic      {format_bytes(result['traffic_bytes'])} a run")
    if bottleneck["worker"] is None:
        click.echo("bottleneck   the cores that workers share")
    else:
        worker, bound_by = bottleneck["worker"], bottleneck["bound_by"]
        click.echo(f"bottleneck   worker {worker}, most of it {bound_by}")
    click.echo()
    loads = sorted(result["loads"], key=lambda row: -row["load"])
    rows = [
        (
            str(row["worker"]),
            str(row["nodes"]),
            f"{row['computing'] * 1e3:.3f}",
            f"{row['messages'] * 1e3:.3f}",
            f"{row['load'] / interval:.1%}",
        )
        for row in loads
    ]
    headers = ("worker", "nodes", "computing ms", "messages ms", "busy")
    show_table(headers, rows, _MOST_ROWS)
    source = result["profile"]
    click.echo(
        f"by {source}; nodes that it lacks are estimated"
        if source
        else "by what penstock profile has measured on this machine; the rest is estimated"
    )
    if "note" in result:
        click.echo(result["note"])
