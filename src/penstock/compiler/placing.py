"""The context of passes: what they may ask about the backends and options of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.backends.base import copier, stacks
from penstock.backends.kernels import KernelTable
from penstock.compiler.overlap import OverlapPolicy
from penstock.compiler.stages import CompileContext
from penstock.ir.graph import Graph, Node
from penstock.ops.internal.transfer import Place, Ports
from penstock.passes.context import FramePolicy, FusionPolicy, PassContext
from penstock.tuning.kernel_placing import KernelPlacing


class BackendPlacing(KernelPlacing):
    """Where nodes run, among the backends of a session: ``choose`` says it, which takes a graph.
    With ``layouts``, the ``kernels`` of the compilation decide the layouts of values."""

    def __init__(
        self,
        context: CompileContext,
        choose: Callable[[Graph], Mapping[Node, Place]] | None = None,
        kernels: KernelTable | None = None,
        layouts: bool = False,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(context.backends, kernels or KernelTable(), ports=ports)
        self._by_name = context.by_name
        self._choose = choose
        self.fuses = context.fuses
        self.plans_layouts = layouts

    def chosen(self, graph: Graph) -> Mapping[Node, Place]:
        return self.placement if self._choose is None else self._choose(graph)

    def direct(self, source: str, target: str) -> bool:
        return copier(self._by_name[source], self._by_name[target]) is not None

    def stacks(self, backend: str) -> bool:
        return stacks(self._by_name[backend])


def pass_context(
    context: CompileContext,
    fusion: FusionPolicy | None = None,
    placing: BackendPlacing | None = None,
    frames: FramePolicy | None = None,
) -> PassContext:
    """The context of passes: by default nodes have no places, and frames are raised, but those that
    ``executor="auto"`` keeps since nodes had better overlap in them."""
    if frames is None:
        frames = OverlapPolicy(context) if context.executor == "auto" else FramePolicy()
    return PassContext(
        limits=context.limits,
        fusion=fusion if context.fuses else None,
        fold_quantized_weights=not context.fuses,
        strict=context.options.precision == "strict",
        weights=context.weights,
        placing=placing or BackendPlacing(context),
        frames=frames,
        after_pass=context.options.after_pass,
    )
