from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from tools.requirements import requirements


def test_requirements_of_an_extra_are_those_that_pip_reads():
    """The extra ``test`` names others, as an extra of Penstock itself."""

    def wanted(extra: str) -> set[str]:
        names = set()
        for text in metadata.requires("penstock-runtime") or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": extra}):
                if requirement.name == "penstock-runtime":
                    names |= set().union(*map(wanted, requirement.extras))
                else:
                    names.add(requirement.name)
        return names

    found = {Requirement(text) for text in requirements("test", "lint")}
    here = {r.name for r in found if r.marker is None or r.marker.evaluate()}
    assert here == wanted("test") | wanted("lint")


def test_requirements_without_extras_are_those_of_every_installation():
    assert {Requirement(text).name for text in requirements()} == {
        *("numpy", "ml_dtypes", "protobuf", "threadpoolctl", "click")
    }
