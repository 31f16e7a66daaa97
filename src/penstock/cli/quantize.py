"""``penstock quantize``: a smaller and faster model within a stated error."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
import numpy as np

from penstock.cli.base import MODEL, SIGNATURE, command, show_table
from penstock.cli.options import file_option, gathered
from penstock.core.checkpoints import WAKE_S, checkpoint
from penstock.core.errors import InvalidInput
from penstock.core.option_records import help_of
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, NamedValues
from penstock.frontends.load import load
from penstock.quantizing.measuring import Metric
from penstock.quantizing.quantize import QuantizeOptions
from penstock.quantizing.quantize import quantize as quantized
from penstock.quantizing.report import error_text

_POSITIVE = click.FloatRange(min=0, min_open=True)
_MOST_ROWS = 30


def _show(result: JsonObject) -> None:
    shares = f"time {result['time']:.3f} and weights {result['size']:.3f} of the original's"
    click.echo(
        f"{result['output']}: {shares}, error {error_text(result['error'])} on samples held out, "
        f"with a limit of {error_text(result['error_limit'])} for others"
    )
    rows = [
        (
            own["name"],
            own["operation"],
            own["type"],
            f"{own['ms_before']:.3f}",
            f"{own['ms_after']:.3f}",
            own["why"],
        )
        for own in result["layers"]
    ]
    show_table(("layer", "operation", "type", "ms before", "ms after", "why"), rows, _MOST_ROWS)
    points = [
        (
            p["note"],
            f"{p['time']:.3f}",
            f"{p['size']:.3f}",
            *(error_text(p[name]) for name in ("error", "error_held_out", "error_limit")),
            "chosen" if p["chosen"] else "",
        )
        for p in result["points"]
    ]
    show_table(("tried", "time", "size", "error", "held out", "limit", ""), points)


def metric_of(program: str) -> Metric:
    """A metric that a program computes: it is called with two folders more, of the float model's
    outputs and of the candidate's, each with a file ``0.npz``, ``1.npz`` ... for each sample, and
    prints a number, 0 for no error."""
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise InvalidInput(f"--metric {program!r} is no command: {error}") from error

    def metric(wanted: Sequence[NamedValues], outputs: Sequence[NamedValues]) -> float:
        # In files: outputs may be larger than what a pipe or a command line takes.
        with tempfile.TemporaryDirectory() as folder:
            folders = [Path(folder) / name for name in ("float", "candidate")]
            for own, samples in zip(folders, (wanted, outputs), strict=True):
                own.mkdir()
                for i, sample in enumerate(samples):
                    np.savez(own / f"{i}.npz", **sample)
            try:
                code, output, errors = _output_of([*words, *map(str, folders)])
            except OSError as error:
                raise InvalidInput(f"--metric {program!r} cannot be run: {error}") from error
            # Programs may tell what they do before.
            last = (output.strip().splitlines() or [""])[-1]
            try:
                if code:
                    raise ValueError(f"it ended with {code}")
                return float(last)
            except ValueError as error:
                more = errors.strip()[-500:]
                raise InvalidInput(
                    f"--metric {program!r} must print a number last: {error} {more}"
                ) from error

    # The name is part of a record's key: only the same program's measurements are resumed.
    metric.__qualname__ = program
    return metric


def _output_of(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a program and return its exit status, output and errors. If this thread is told to stop
    meanwhile, the program is killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            while True:
                checkpoint()
                with suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=WAKE_S)
                    return process.returncode, output, errors
        finally:
            process.kill()


@dataclass(frozen=True)
class _Options:
    """The options that ``penstock.quantize`` takes as well."""

    max_error: float | None
    metric: str | None
    time: float | None
    size: float | None
    independent_rows: bool
    threads: int | None
    timeout: float | None
    resume: Path | None


def _help(name: str) -> str:
    return help_of(QuantizeOptions, name)


@command(_show)
@MODEL
@SIGNATURE
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True),
    help="Samples: a folder of .npz files with arrays by the names of inputs (or of .npy files for "
    "one input), or one such file, whose arrays have the samples along an axis in front.",
)
@click.option("--max-error", type=_POSITIVE, metavar="E", help=_help("max_error"))
@click.option(
    "--metric",
    metavar="PROGRAM",
    help="A program that measures the error in place of that: called with two folders more, of the "
    "float model's outputs and of a candidate's, each with 0.npz, 1.npz ... for the samples; "
    "prints a number, of which --max-error is the bound.",
)
@click.option("--time", type=_POSITIVE, metavar="SHARE", help=_help("time"))
@click.option("--size", type=_POSITIVE, metavar="SHARE", help=_help("size"))
@click.option("--independent-rows", is_flag=True, help=_help("independent_rows"))
@click.option("--threads", type=click.IntRange(min=1), help=_help("threads"))
@click.option("--timeout", type=click.FloatRange(min=0), help=_help("timeout"))
@file_option("--resume", help=_help("resume"))
@file_option("--report", help="File for a page about what was done, and why.")
@file_option(
    "--output",
    "-o",
    required=True,
    help="File to write: a saved session if its name ends in .penstock; TFLite with its own codes "
    "if it ends in .tflite, for which MODEL must be a TFLite file; else ONNX.",
)
@gathered("options", _Options)
def quantize(
    model: str,
    signature: str | None,
    data: str,
    output: Path,
    report: Path | None,
    options: _Options,
) -> JsonObject:
    """Quantize a model: choose a type for each layer, by measured times and errors, so that it is
    as fast as the error allows that you state."""
    program = options.metric
    if program is not None and options.max_error is None:
        raise click.UsageError("--metric needs --max-error, the largest number that it may print")
    result = quantized(
        load(model, signature=signature),
        data,
        max_error=options.max_error,
        metric=None if program is None else metric_of(program),
        time=options.time,
        size=options.size,
        independent_rows=options.independent_rows,
        threads=options.threads,
        timeout=options.timeout,
        resume=options.resume,
        output=output,
    )
    if report is not None:
        report.write_text(result.html, encoding="utf-8")
    return {**result.report, "output": str(output)}
