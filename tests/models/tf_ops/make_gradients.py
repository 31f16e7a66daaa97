"""Makes ``gradients.npz.xz``: operations of gradients and of variants, one by one.

Needs TensorFlow (2.21), as ``make.py`` does, and stores the same of each case.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from make import case, real, save, several

raw = tf.raw_ops


def slices() -> None:
    places = {
        "plain": {"begin": [0, 2, 1], "end": [2, 0, 4], "strides": [1, -1, 2]},
        "masks": {
            "begin": [1, 1, 3],
            "end": [9, 0, 0],
            "strides": [1, 1, -1],
            "begin_mask": 1,
            "end_mask": 6,
        },
        "both": {
            "begin": [0, 0, 0, 1],
            "end": [0, 0, 0, 2],
            "strides": [1, 1, 1, 1],
            "ellipsis_mask": 1,
            "new_axis_mask": 2,
            "shrink_axis_mask": 8,
        },
        "empty": {"begin": [1, 2, 0], "end": [1, 9, 9], "strides": [1, 1, 1]},
    }
    for name, given in places.items():
        dy = real(*raw.StridedSlice(input=tf.zeros([2, 3, 4]), **given).shape)
        case(f"StridedSliceGrad_{name}", "StridedSliceGrad", {"dy": dy}, shape=[2, 3, 4], **given)


def variants() -> None:
    def listed(x: tf.Tensor) -> tf.Tensor:
        return raw.TensorListFromTensor(tensor=x, element_shape=[2])

    def stacked(handle: tf.Tensor) -> tf.Tensor:
        return raw.TensorListStack(input_handle=handle, element_shape=[2], element_dtype=tf.float32)

    def reserved(x: tf.Tensor) -> tf.Tensor:
        """With one element set of three."""
        handle = raw.TensorListReserve(element_shape=[2], num_elements=3, element_dtype=tf.float32)
        return raw.TensorListSetItem(input_handle=handle, index=1, item=x[0])

    def lists(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        sums = [raw.AddN(inputs=[listed(x), listed(y), reserved(y)]), raw.AddN(inputs=[listed(x)])]
        sums.append(raw.AddN(inputs=[reserved(x), reserved(y)]))
        zeros = raw.ZerosLike(x=listed(x))
        return [*map(stacked, (*sums, zeros)), raw.TensorListLength(input_handle=zeros)]

    def optionals(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        def optional(value: tf.Tensor) -> tf.Tensor:
            return raw.OptionalFromValue(components=[value, listed(value)])

        given = {"output_types": [tf.float32, tf.variant], "output_shapes": [[None, 2], []]}
        results = []
        for each in (raw.AddN(inputs=[optional(x), optional(y)]), raw.ZerosLike(x=optional(x))):
            tensor, handle = raw.OptionalGetValue(optional=each, **given)
            results += [tensor, stacked(handle), raw.OptionalHasValue(optional=each)]
        none = raw.AddN(inputs=[raw.OptionalNone(), raw.ZerosLike(x=raw.OptionalNone())])
        return [*results, raw.OptionalHasValue(optional=none)]

    def lists_of_lists(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        def outer(value: tf.Tensor) -> tf.Tensor:
            handle = raw.EmptyTensorList(
                element_shape=tf.constant([], tf.int32),
                max_num_elements=2,
                element_dtype=tf.variant,
            )
            for each in (value, 2 * value):
                handle = raw.TensorListPushBack(input_handle=handle, tensor=listed(each))
            return handle

        whole = raw.AddN(inputs=[outer(x), raw.ZerosLike(x=outer(y)), outer(y)])
        popped, last = raw.TensorListPopBack(
            input_handle=whole, element_shape=tf.constant([], tf.int32), element_dtype=tf.variant
        )
        first = raw.TensorListGetItem(
            input_handle=popped,
            index=0,
            element_shape=tf.constant([], tf.int32),
            element_dtype=tf.variant,
        )
        return [stacked(first), stacked(last)]

    names = ("AddN_lists", "OptionalGetValue_sums", "TensorListGetItem_lists")
    for name, build in zip(names, (lists, optionals, lists_of_lists), strict=True):
        several(name, build, {"x": real(3, 2), "y": real(3, 2)})


def convolutions() -> None:
    image = (2, 7, 6, 4)

    def both(
        name: str, op: str, of_image: str, of_filter: str, x: tuple[int, ...], **given
    ) -> None:
        """The gradients of a convolution for its image and for its filter."""
        window = given.pop("window")
        dy = getattr(raw, op)(input=tf.zeros(x), filter=tf.zeros(window), **given).shape
        case(f"{of_filter}_{name}", of_filter, {"input": real(*x), "out_backprop": real(*dy)},
             filter_sizes=list(window), **given)  # fmt: skip
        case(f"{of_image}_{name}", of_image, {"filter": real(*window), "out_backprop": real(*dy)},
             input_sizes=list(x), **given)  # fmt: skip

    plane = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    for padding in ("SAME", "VALID"):
        given = {"strides": [1, 2, 2, 1], "padding": padding}
        both(f"grad_{padding}", *plane, image, window=(3, 2, 4, 5), **given)
    given = {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 1, 1]}
    both("dilated", *plane, image, window=(3, 3, 4, 5), **given)
    given = {"strides": [1, 2, 1, 1], "padding": "EXPLICIT"}
    pads = [0, 0, 1, 2, 0, 1, 0, 0]
    both("explicit", *plane, image, window=(3, 3, 4, 5), explicit_paddings=pads, **given)
    both("groups", *plane, image, window=(3, 3, 2, 6), strides=[1, 1, 1, 1], padding="SAME")
    name = "DepthwiseConv2dNative"
    depthwise = (name, f"{name}BackpropInput", f"{name}BackpropFilter")
    for padding, step in (("SAME", 1), ("VALID", 2)):
        given = {"strides": [1, step, step, 1], "padding": padding}
        both(padding, *depthwise, image, window=(3, 3, 4, 2), **given)
    cube = ("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2")
    given = {"strides": [1, 1, 2, 2, 1], "padding": "SAME"}
    both("grad", *cube, (1, 4, 5, 4, 2), window=(2, 2, 3, 2, 3), **given)
    sizes = {"filter_sizes": np.array([3, 2, 4, 5], np.int32), "out_backprop": real(2, 4, 3, 5)}
    case("Conv2DBackpropFilter_dynamic", plane[2], {"input": real(*image), **sizes},
         strides=[1, 2, 2, 1], padding="SAME")  # fmt: skip
    given = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    sizes = {"input_sizes": np.array(image, np.int32), "out_backprop": real(2, 7, 6, 6)}
    case("Conv2DBackpropInput_groups_dynamic", plane[1], {"filter": real(3, 3, 2, 6), **sizes},
         **given)  # fmt: skip


def pools() -> None:
    shapes = {"": (2, 7, 6, 3), "3D": (1, 4, 5, 4, 2)}
    for dims, shape in shapes.items():
        for padding, window, step in (("SAME", 3, 2), ("VALID", 2, 1), ("SAME", 2, 2)):
            spatial = len(shape) - 2
            given = {"ksize": [1, *[window] * spatial, 1], "strides": [1, *[step] * spatial, 1]}
            given["padding"] = padding
            x = tf.constant(real(*shape))
            y = getattr(raw, f"MaxPool{dims}")(input=x, **given)
            fed = {"orig_input": x.numpy(), "orig_output": y.numpy(), "grad": real(*y.shape)}
            case(f"MaxPool{dims}Grad_{padding}_{window}", f"MaxPool{dims}Grad", fed, **given)
            case(f"AvgPool{dims}Grad_{padding}_{window}", f"AvgPool{dims}Grad",
                 {"grad": real(*y.shape)}, orig_input_shape=list(shape), **given)  # fmt: skip
    ties = np.zeros((1, 5, 5, 1), np.float32)
    given = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    fed = {"orig_input": ties, "orig_output": ties[:, :3, :3], "grad": real(1, 3, 3, 1)}
    case("MaxPoolGrad_ties", "MaxPoolGrad", fed, **given)
    fed = {"orig_input_shape": np.array([2, 7, 6, 3], np.int32), "grad": real(2, 4, 3, 3)}
    case("AvgPoolGrad_dynamic", "AvgPoolGrad", fed, **given)


def normalizations() -> None:
    x = 3 * real(2, 4, 5, 3) + 1
    for training in (True, False):
        mean, variance = real(3), np.abs(real(3)) + 1
        if training:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        for version in ("", "V2", "V3"):
            given = {"is_training": training, "epsilon": 0.01}
            if version == "V3":
                given["reserve_space_3"] = np.zeros(0, np.float32)
            fed = {"y_backprop": real(*x.shape), "x": x, "scale": real(3)}
            fed |= {"reserve_space_1": mean, "reserve_space_2": variance}
            name = f"FusedBatchNormGrad{version}"
            several(f"{name}_{training}", partial(_normalization, name, given), fed)


def _normalization(name: str, given: dict[str, Any], **fed: tf.Tensor) -> list[tf.Tensor]:
    """All results that a caller may read: the last two are for other devices."""
    return list(getattr(raw, name)(**fed, **given))[:3]


def activations() -> None:
    y, dy = 3 * real(9), real(9)
    for op in ("EluGrad", "SeluGrad"):
        case(op, op, {"gradients": dy, "outputs": np.maximum(y, -1)})
    for op in ("SoftplusGrad", "SoftsignGrad"):
        case(op, op, {"gradients": dy, "features": y})
    case("LeakyReluGrad", "LeakyReluGrad", {"gradients": dy, "features": y}, alpha=0.3)


def losses() -> None:
    scores = 4 * real(4, 3)
    labels = np.array([[0, 1, 0], [0.2, 0.5, 0.3], [1, 0, 0], [0, 0, 0]], np.float32)
    for name, given in (("rows", labels), ("one", labels[1:2])):
        op = "SoftmaxCrossEntropyWithLogits"
        case(f"{op}_{name}", op, {"features": scores, "labels": given})
    far = np.array([[1e4, 0, -1e4]], np.float32)
    case(f"{op}_far", op, {"features": far, "labels": labels[:1]})
    for dtype in (np.int32, np.int64):
        op = "SparseSoftmaxCrossEntropyWithLogits"
        classes = np.array([2, 0, 1, 1], dtype)
        case(f"{op}_{dtype.__name__}", op, {"features": scores, "labels": classes})


def steps() -> None:
    """Two steps of training, of a variable and its slots."""
    rates = {
        "GradientDescent": {"alpha": 0.1},
        "Momentum": {"lr": 0.1, "momentum": 0.9},
        "KerasMomentum": {"lr": 0.1, "momentum": 0.9},
        "Adam": {
            "beta1_power": 0.9,
            "beta2_power": 0.99,
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.99,
            "epsilon": 1e-3,
        },
        "RMSProp": {"lr": 0.1, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-3},
    }
    slots = {"GradientDescent": (), "Adam": ("m", "v"), "RMSProp": ("ms", "mom")}
    for op, scalars in rates.items():
        for ahead in (False, True)[: 1 + (op in ("Momentum", "KerasMomentum", "Adam"))]:
            given = {**scalars, **({"use_nesterov": True} if ahead else {})}
            names = ("var", *slots.get(op, ("accum",)))
            fed = {name: np.abs(real(2, 3)) for name in names} | {"grad": real(2, 3)}
            name = f"ResourceApply{op}"
            several(f"{name}_{ahead}", partial(_steps, name, names, given), fed)


def _steps(
    op: str, names: tuple[str, ...], given: dict[str, Any], grad: tf.Tensor, **first: tf.Tensor
) -> list[tf.Tensor]:
    handles = {
        name: raw.VarHandleOp(dtype=tf.float32, shape=[2, 3], shared_name=name) for name in names
    }
    with tf.control_dependencies(
        [raw.AssignVariableOp(resource=handles[name], value=first[name]) for name in names]
    ):
        dx = tf.identity(grad)
    gradient = "delta" if op.endswith("Descent") else "grad"
    for _ in range(2):
        with tf.control_dependencies([getattr(raw, op)(**handles, **{gradient: dx}, **given)]):
            dx = -2 * tf.identity(grad)
    with tf.control_dependencies([dx]):
        return [raw.ReadVariableOp(resource=each, dtype=tf.float32) for each in handles.values()]


if __name__ == "__main__":
    for part in (slices, variants, convolutions, pools, normalizations, activations, losses, steps):
        part()
    save("gradients")
