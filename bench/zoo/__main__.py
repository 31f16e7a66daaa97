"""``python -m bench.zoo generate [NAME ...] | check [NAME ...] | report | sample``.

NAME is a part of GROUP/NAME. ``generate`` runs in the environment that has the libraries, the rest
in Penstock's own.
"""

from __future__ import annotations

import argparse
from importlib import import_module

# Each module offers the recipes of its groups.
GENERATORS = {
    "scikit-learn": "scikit",
    "lightgbm": "boosting",
    "xgboost": "boosting",
    "torch-modules": "torch_modules",
    "torchvision": "torch_nets",
    "timm": "torch_nets",
    "transformers": "transformers_models",
    "keras": "keras_models",
    "tensorflow": "keras_models",
    "jax": "jax_models",
    "derived": "derived",
}


def generate(arguments: argparse.Namespace) -> None:
    from bench.zoo import store

    for group, module in GENERATORS.items():
        # A name without a slash may be of any group, one with a slash says its own.
        if arguments.names and not any(
            "/" not in n or n.startswith(group) for n in arguments.names
        ):
            continue
        recipes = import_module(f"bench.zoo.{module}").recipes(group)
        store.generate(group, recipes, arguments.names, arguments.again)


def check(arguments: argparse.Namespace) -> None:
    from bench.zoo import check, store

    entries = store.entries(arguments.names)
    if arguments.new:
        known = {finding.key for finding in check.kept()}
        entries = [e for e in entries if f"{e.group}/{e.name}" not in known]
    if arguments.answers:
        check.check(entries, turns=1, seconds=0, threads=(1,))
    else:
        threads = (1,) if arguments.one_thread else check.THREADS
        check.check(entries, arguments.turns, arguments.seconds, threads)


def report(_: argparse.Namespace) -> None:
    from bench.zoo.report import write

    write()


def sample(_: argparse.Namespace) -> None:
    from bench.zoo import check, sample, store

    sample.write(store.entries(), check.kept())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("generate", help="make the models that are not there yet")
    command.set_defaults(run=generate)
    command.add_argument("names", nargs="*", metavar="NAME")
    command.add_argument("--again", action="store_true", help="make those that are there, too")
    command = commands.add_parser("check", help="compare answers and times with ONNX Runtime")
    command.set_defaults(run=check)
    command.add_argument("names", nargs="*", metavar="NAME")
    command.add_argument("--answers", action="store_true", help="time nothing")
    command.add_argument("--new", action="store_true", help="only models without findings")
    command.add_argument("--one-thread", action="store_true", help="time with one thread only")
    command.add_argument("--turns", type=int, default=3)
    command.add_argument("--seconds", type=float, default=0.03, help="of each case and turn")
    command = commands.add_parser("report", help="write bench/zoo.md")
    command.set_defaults(run=report)
    command = commands.add_parser("sample", help="write the models that the tests run")
    command.set_defaults(run=sample)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
