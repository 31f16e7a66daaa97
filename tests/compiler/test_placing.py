"""The context of passes, as the options of a session make it."""

from __future__ import annotations

from penstock.backends.numpy import NumpyBackend
from penstock.compiler.options import CompileOptions
from penstock.compiler.overlap import OverlapPolicy
from penstock.compiler.placing import BackendPlacing, pass_context
from penstock.compiler.stages import CompileContext
from penstock.passes.context import FramePolicy


def context_of(executor: str) -> CompileContext:
    return CompileContext(CompileOptions(executor=executor), (NumpyBackend(),))


def test_pass_context_of_auto_alone_keeps_frames_for_overlap() -> None:
    assert isinstance(pass_context(context_of("auto")).frames, OverlapPolicy)
    assert type(pass_context(context_of("linear")).frames) is FramePolicy


def test_backend_placing_without_a_choice_keeps_the_placement() -> None:
    placing = BackendPlacing(context_of("linear"))
    assert placing.chosen.__self__ is placing
    assert not placing.plans_layouts
    assert not placing.stacks("numpy")
