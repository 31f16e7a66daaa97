"""Conv and ConvTranspose over one to three axes, with groups, strides, dilations and a bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PRELU, PostOp
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.spec import (
    BoundPrimitive,
    Constants,
    PrimitiveSpec,
    SpecContext,
    absorb,
)
from penstock.backends.onednn.weights import Seen, Weights, weights_of
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32
from penstock.host.on_demand import imported
from penstock.ir.layout import channels_last
from penstock.ops.common.windows import Window, behind, windows

# Of transposed convolutions, which few models have.
_TRANSPOSED_WINDOWS = imported("penstock.ops.onnx.deconvolution.transposed_windows")
_BINARY_SPEC = imported("penstock.backends.onednn.eltwise.binary_spec")

# A deconvolution with fewer filters than elements in a register, and either one group or fewer
# weights for a filter, is faster in NumPy.
_FEWEST_FILTERS, _FEWEST_WEIGHTS = 4, 9


def convolution(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a Conv with constant weights and no or a constant bias."""
    node, x, w = desc.node, desc.input(0), desc.constant(1)
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    group = node.attrs.get("group", 1)
    axes = windows(node.attrs, w.shape[2:], x.dims[2:])
    # Axes of one element are dropped: over an axis of width 1, kernels are 100 times slower.
    kept = [i for i, axis in enumerate(axes) if not axis.trivial or axis.size > 1] or [0]
    seen = partial(_with_axes, kept)
    channels = (group, w.shape[0] // group) if group > 1 else w.shape[:1]
    shape = (*channels, w.shape[1], *[w.shape[2 + i] for i in kept])
    own = None if desc.scaling is None else desc.scaling.weights
    weights = weights_of(w, shape) if own is None else own(shape)
    spec = _spec("convolution", desc, weights, [axes[i] for i in kept], seen)
    return None if spec is None else replace(spec, summed=spec.desc.summed)


def _with_axes(kept: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """``dims`` of an image, without the axes that are not kept."""
    return (*dims[:2], *[dims[2 + i] for i in kept])


def deconvolution(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a ConvTranspose with constant weights and no or a constant bias."""
    node, x, w = desc.node, desc.input(0), desc.constant(1)
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    group = node.attrs.get("group", 1)
    if w.shape[1] < _FEWEST_FILTERS and (group == 1 or prod(w.shape[2:]) < _FEWEST_WEIGHTS):
        return None
    axes = _TRANSPOSED_WINDOWS(node.attrs, w.shape[2:], x.dims[2:])
    of_group = w.shape[1], len(w) // group, *w.shape[2:]
    shape = (group, *of_group) if group > 1 else of_group
    weights = weights_of(w, shape, Seen(("by result", group), partial(_by_result, group)))
    steps = [axis for axis in axes if isinstance(axis, Window)]
    whole = _spec("deconvolution", desc, weights, steps, tuple)
    alone = replace(desc, inputs=desc.inputs[:2], post_ops=())
    plain = _spec("deconvolution", alone, weights, steps, tuple)
    if whole is None or plain is None or (desc.index(2) < 0 and not desc.post_ops):
        return whole
    bias, target = desc.constant(2), desc.outputs[0]
    if bias is not None or desc.post_ops[0].binary in ("", PRELU):
        terms = np.zeros(desc.output.dims[1], FLOAT32) if bias is None else bias
        add = PostOp(binary="add", tensor=len(desc.constants))
        desc = desc.behind([add], terms.reshape(-1, *[1] * len(steps)))
    rest = _BINARY_SPEC(desc, target)

    def create(context: SpecContext) -> BoundPrimitive:
        # Most code adds biases and applies post-ops element by element, 30 to 100 times slower than
        # a primitive of its own does.
        first = plain.create(replace(context, desc=plain.desc))
        if first.primitive.implementation.startswith("brg") and not context.releasable:
            both = whole.create(context)
            if both.primitive.implementation.startswith("brg"):
                return both
        first.then = rest.create(replace(context, desc=rest.desc))
        return first

    return replace(whole, create=create)


def _by_result(group: int, w: np.ndarray) -> np.ndarray:
    """Weights [channels, filters of a group, ...] with the axes of group and filters first."""
    if group == 1:
        return np.swapaxes(w, 0, 1)
    return np.swapaxes(w.reshape(group, len(w) // group, *w.shape[1:]), 1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _DirectConvolution:
    """Creates the primitive ``name``, with ``tensors`` and ``constants``, of which one is the
    ``bias``, by oneDNN's number of the argument."""

    name: str
    desc: OpDesc
    constants: Constants
    bias: np.ndarray | None
    axes: Sequence[Window]
    seen: Callable[[Sequence[int]], Sequence[int]]
    tensors: dict[int, int]

    def __call__(self, context: SpecContext) -> BoundPrimitive:
        desc, axes, source = self.desc, self.axes, self.tensors[SRC]
        narrows = self.name == "convolution"
        operand = context.operand if narrows else context.descriptor
        own = (context.weights if narrows else context.any)(self.constants[WEIGHTS].shape)
        result = context.descriptor(self.tensors[DST], self.seen(desc.output.dims))
        image = operand(source, self.seen(desc.dims(source)))
        layouts = [image, own, context.of(self.bias), result]
        # oneDNN counts what lies between two elements of a kernel.
        steps = [[a.stride for a in axes], [a.dilation - 1 for a in axes]]
        direct = f"{self.name}_direct"
        arguments = [direct, *layouts, *steps, [a.begin for a in axes], behind(axes)]
        kind = f"{self.name}_forward"
        return context.primitive(kind, arguments, self.tensors, self.constants, view=self.seen)


def _spec(
    name: str,
    desc: OpDesc,
    weights: Weights,
    axes: Sequence[Window],
    seen: Callable[[Sequence[int]], Sequence[int]],
) -> PrimitiveSpec | None:
    """The specification with these ``weights``. The bias is the third input, or else the constant
    that the first post-op adds."""
    bias = desc.constant(2)
    if desc.index(2) < 0:
        bias, desc = desc.without_bias(1)
    elif bias is None:
        return None
    source, target = desc.inputs[0], desc.outputs[0]
    constants: Constants = {WEIGHTS: weights}
    if bias is not None:
        constants[BIAS] = weights_of(bias)
    desc, absorbed = absorb(desc, {1: weights})
    create = _DirectConvolution(name, desc, constants, bias, axes, seen, {SRC: source, DST: target})
    order = channels_last(len(desc.output.dims))
    return PrimitiveSpec(desc, create, order, (source, *desc.whole()), weights=absorbed)
