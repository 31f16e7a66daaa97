"""The context of passes, as the options of a session make it."""

from __future__ import annotations

from penstock.backends.numpy import NumpyBackend
from penstock.compiler.lowering import BackendPlacing, pass_context
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext
from penstock.passes.context import FramePolicy
from tests.support.onnx_text import graph_from_text


def context_of(executor: str) -> CompileContext:
    return CompileContext(CompileOptions(executor=executor), (NumpyBackend(),))


def test_pass_context_raises_all_frames_by_default() -> None:
    assert type(pass_context(context_of("auto")).frames) is FramePolicy


def test_backend_placing_without_a_choice_keeps_the_placement() -> None:
    placing = BackendPlacing(context_of("linear"))
    graph = graph_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    assert placing.chosen(graph) is placing.placement
    assert not placing.plans_layouts
    assert not placing.stacks("numpy")
