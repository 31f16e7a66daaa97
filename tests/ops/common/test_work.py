"""Operations of products, counted one by one."""

from __future__ import annotations

from penstock.ops.common.products import (
    attention_work,
    convolution_work,
    deconvolution_work,
    product_work,
    recurrent_work,
)


def test_product_has_a_multiplication_and_an_addition_for_each_inner_element():
    assert product_work({}, [(2, 3), (3, 5)], (2, 5)) == 2 * 2 * 3 * 5
    assert product_work({"transA": 1}, [(3, 2), (3, 5)], (2, 5)) == 2 * 2 * 3 * 5
    assert product_work({"transA": 1}, [(3,), (3, 5)], (5,)) == 2 * 3 * 5


def test_convolution_has_a_filter_for_each_result():
    work = convolution_work(1)
    assert work({}, [(1, 4, 8, 8), (6, 2, 3, 3)], (1, 6, 6, 6)) == 2 * 216 * 18
    assert convolution_work(3)({}, [(1,), None, None, (6, 2, 3)], (6,)) == 2 * 6 * 6


def test_deconvolution_has_a_filter_for_each_input():
    assert deconvolution_work({}, [(1, 4, 5, 5), (4, 2, 3, 3)], (1, 2, 7, 7)) == 2 * 100 * 18


def test_recurrent_layer_has_both_products_in_each_step():
    assert recurrent_work({}, [(7, 2, 3), (1, 20, 3), (1, 20, 5)], (7, 1, 2, 5)) == 2 * 14 * 160


def test_attention_has_two_products():
    dims = [(2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)]
    scores = product_work({}, [dims[0], (2, 4, 8, 5)], (2, 4, 3, 5))
    assert attention_work({}, dims, dims[0]) == 2 * scores


def test_work_of_unknown_dims_is_0():
    assert product_work({}, [None, (3, 5)], (2, 5)) == 0
    assert convolution_work(1)({}, [(1, 4, 8, 8), None], (1, 6, 6, 6)) == 0
    assert deconvolution_work({}, [None, (4, 2, 3, 3)], (1,)) == 0
    assert recurrent_work({}, [(7, 2, 3), None, (1, 20, 5)], (1,)) == 0
    assert attention_work({}, [(1, 2), None], (1, 2)) == 0
