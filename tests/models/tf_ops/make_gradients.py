"""Makes ``gradients.npz.xz``: operations of gradients and of variants, one by one.

Needs TensorFlow (2.21), as ``make.py`` does, and stores the same of each case.
"""

from __future__ import annotations

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
        for each in (
            raw.AddN(inputs=[optional(x), optional(y)]),
            raw.ZerosLike(x=optional(x)),
        ):
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


if __name__ == "__main__":
    slices()
    variants()
    save("gradients")
