"""Options of compiled models."""

from __future__ import annotations

import pytest

from penstock.compat.ai_edge_litert.options import (
    CpuKernelMode,
    CpuOptions,
    Options,
    without_effect,
)

theirs = pytest.importorskip("ai_edge_litert.options")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Options(), []),
        (Options(cpu_options=CpuOptions(num_threads=3)), []),
        (Options(cpu_options=CpuOptions(kernel_mode=CpuKernelMode.REFERENCE)), ["kernel_mode"]),
        (Options(gpu_options=object()), ["gpu_options"]),
    ],
)
def test_options_without_effect_are_known(options: Options, names: list[str]) -> None:
    assert without_effect(options) == names


def test_numbers_and_names_are_those_of_litert() -> None:
    real = theirs.CpuKernelMode.__members__
    assert {name: int(mode) for name, mode in CpuKernelMode.__members__.items()}.items() <= {
        name: int(mode) for name, mode in real.items()
    }.items()
    assert vars(CpuOptions()).keys() == vars(theirs.CpuOptions()).keys()


def test_options_of_litert_are_taken() -> None:
    options = theirs.Options(cpu_options=theirs.CpuOptions(num_threads=2, xnnpack_flags=1))
    assert without_effect(options) == ["xnnpack_flags"]
