"""The report of the zoo: ``bench/zoo.md``, from the findings in the cache folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path

from bench.tables import LOADING_PEER, OURS, geometric_mean, heading, line
from bench.versus import described
from bench.zoo.check import Finding, kept
from bench.zoo.store import Entry, entries

FILE = Path(__file__).parents[1] / "zoo.md"
WORST = 20
SLOW = 1.2  # a ratio over which a case stands in the table of causes
TITLES = {
    "row 1": "row",
    "batch 1": "batch",
    "row default": "row, default threads",
    "batch default": "batch, default threads",
    "load": "load + first run",
}


def write() -> None:
    lines = report(entries(), kept())
    FILE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def report(made: Sequence[Entry], findings: Sequence[Finding]) -> list[str]:
    """The document, in Markdown."""
    lines = [
        "# The zoo: models as exporters write them",
        "",
        f"Written on {date.today().isoformat()} by `make bench-zoo`: {described()}.",
        f"Ratios are times of {OURS} to those of {LOADING_PEER}: geometric means of the models "
        "that both run, each of the fastest run of a turn, the median of the turns; with one thread "
        "where nothing else is said. Loads and first runs are in seconds of the processor. "
        "Refused: by Penstock alone. Wrong: off where the other is not.",
    ]
    lines += heading(
        "Groups.",
        ["group", "models", "not exported", "both refuse", "refused", "wrong", *TITLES.values()],
    )
    for group in sorted({entry.group for entry in made}):
        of_group = [finding for finding in findings if finding.group == group]
        models = [entry for entry in made if entry.group == group]
        lines.append(_group_line(group, models, of_group))
    lines.append(_group_line("all", made, findings))
    lines += causes_table(findings)
    lines += _faults("Refused by Penstock, and run by the other.", findings, refused_alone)
    lines += _faults("Wrong.", findings, lambda finding: _wrongness(finding))
    for group, several in groupby(findings, lambda finding: finding.group):
        lines += worst_table(f"{group}: the worst {WORST}, by run ratio.", list(several), WORST)
    return lines


def refused_alone(finding: Finding) -> str | None:
    """The error of a model that Penstock alone refuses."""
    return None if finding.peer_refused else finding.refused


def _wrongness(finding: Finding) -> str | None:
    if not finding.wrong:
        return None
    figures = (finding.difference, finding.from_library, finding.peer_from_library)
    shown = ["-" if figure is None else f"{figure:.1e}" for figure in figures]
    return f"{shown[0]} apart; from the library {shown[1]}, {LOADING_PEER} {shown[2]}"


def _group_line(group: str, made: Sequence[Entry], findings: Sequence[Finding]) -> str:
    means = (geometric_mean(f.ratios.get(title) for f in findings) for title in TITLES)
    return line(
        group,
        len([entry for entry in made if not entry.error]),
        len([entry for entry in made if entry.error]),
        len([f for f in findings if f.refused and f.peer_refused]),
        len([f for f in findings if refused_alone(f)]),
        len([f for f in findings if f.wrong]),
        *("-" if mean is None else f"{mean:.2f}" for mean in means),
    )


def _faults(
    title: str, findings: Iterable[Finding], fault: Callable[[Finding], str | None]
) -> list[str]:
    lines = heading(title, ["model", "why"])
    for finding in findings:
        text = fault(finding)
        if text:
            lines.append(line(finding.key, text.replace("|", "\\|")))
    return lines


def causes_table(findings: Iterable[Finding]) -> list[str]:
    """The steps that take longest in cases that are slow, by the time that they lose in all."""
    cases: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for finding in findings:
        for case, steps in finding.steps.items():
            title = f"{case} 1"
            if steps and finding.ratios.get(title, 0.0) > SLOW:
                ours, theirs = finding.times[title]
                step = steps.split(", ")[0].rpartition(" ")[0]
                ratio = finding.ratios[title]
                cases[step].append((ratio, ours - theirs, f"{finding.key} {case} {ratio:.1f}"))
    lines = heading(
        f"Cases over {SLOW:g} by the step that takes longest.",
        ["step", "cases", "mean of ratios", "lost, us", "the worst"],
    )
    for step, slow in sorted(cases.items(), key=lambda item: -sum(lost for _, lost, _ in item[1])):
        mean = geometric_mean(ratio for ratio, _, _ in slow)
        lost = sum(lost for _, lost, _ in slow)
        worst = ", ".join(name for *_, name in sorted(slow, reverse=True)[:3])
        lines.append(line(step, len(slow), f"{mean:.2f}", f"{lost * 1e6:.0f}", worst))
    return lines


def run_ratio(finding: Finding) -> float:
    """The worst of a run with one thread."""
    return max((r for title, r in finding.ratios.items() if title.endswith(" 1")), default=0.0)


def worst_table(title: str, findings: Sequence[Finding], count: int) -> list[str]:
    """The models with the highest ratios, with both times and the steps that take the time."""
    lines = heading(
        title, ["model", "case", "ratio", f"{OURS}, us", f"{LOADING_PEER}, us", "the longest steps"]
    )
    for finding in sorted(findings, key=run_ratio, reverse=True)[:count]:
        if not finding.ratios:
            continue
        titles = [title for title in finding.ratios if title.endswith(" 1")]
        case = max(titles, key=finding.ratios.__getitem__)
        ours, theirs = finding.times[case]
        name = case.removesuffix(" 1")
        figures = f"{finding.ratios[case]:.2f}", f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f}"
        lines.append(line(finding.key, name, *figures, finding.steps.get(name, "")))
    return lines
