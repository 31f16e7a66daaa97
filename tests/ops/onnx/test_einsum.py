"""Einsum: every way its terms can be lowered."""

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx.einsum import EinsumLowering, parse_equation
from tests.ops.harness import check_node

rng = np.random.default_rng(0)

CASES = [
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ij->j", [(2, 3)]),
    ("ij", [(2, 3)]),
    ("ba", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("...ii->...i", [(2, 5, 3, 3)]),
    ("iji->j", [(3, 2, 3)]),
    ("...->...", [(2, 3)]),
    ("->", [()]),
    (",->", [(), ()]),
    (",i->i", [(), (3,)]),
    ("i,i->", [(4,), (4,)]),
    ("i,i", [(4,), (4,)]),
    ("i,i->i", [(4,), (4,)]),
    ("i,j->ij", [(4,), (3,)]),
    ("i,j->ji", [(4,), (3,)]),
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk->ki", [(2, 3), (3, 4)]),
    ("ij,jk->ki", [(2, 5), (5, 4)]),
    ("bij,bjk->bki", [(3, 2, 5), (3, 5, 4)]),
    ("ij, jk", [(2, 3), (3, 4)]),
    ("ij,kj->ik", [(2, 3), (4, 3)]),
    ("ij,ij->i", [(2, 3), (2, 3)]),
    ("bij,bjk->bik", [(5, 2, 3), (5, 3, 4)]),
    ("bij,bjk->ibk", [(5, 2, 3), (5, 3, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
    ("bhqk,bkhd->bqhd", [(2, 3, 4, 6), (2, 6, 3, 5)]),
    ("...ij,...jk->...ik", [(5, 2, 3), (6, 5, 3, 4)]),
    ("...ij,...jk", [(5, 2, 3), (6, 1, 3, 4)]),
    ("i...,i...->...", [(2, 3, 4), (2, 4)]),
    ("abc,bd->acd", [(2, 3, 4), (3, 5)]),
    ("ab,c->b", [(2, 3), (4,)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("ij,ij->ij", [(1, 3), (2, 1)]),
    ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]),
    ("ab,bc,ca->", [(2, 3), (3, 4), (4, 2)]),
    ("ab,ab,ab->ba", [(2, 3)] * 3),
    ("a,a,a,a,b->b", [(3,)] * 4 + [(2,)]),
    ("abij,cdij,efij->abcdefij"[:9] + "->abcd", [(2, 2, 3, 4), (2, 3, 3, 4)]),
    ("ij,jk->ik", [(0, 3), (3, 4)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
    ("Ab,bC->CA", [(2, 3), (3, 4)]),
    ("aB,Bc", [(2, 3), (3, 4)]),
]


def draw(shape, dtype=np.float32):
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 4, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("equation, shapes", CASES)
def test_einsum_matches_the_reference(equation, shapes):
    operands = [draw(s) for s in shapes]
    want = np.asarray(np.einsum(equation.replace(" ", ""), *operands))
    check_node("Einsum", operands, {"equation": equation}, expected=[want])


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.uint16, np.int64])
@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk->k", "ij,jk->ijk"])
def test_einsum_of_every_dtype_matches_the_definition(equation, dtype):
    a, b = draw((2, 3), dtype), draw((3, 4), dtype)
    want = np.einsum(equation, a, b)
    check_node("Einsum", [a, b], {"equation": equation}, expected=[want])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_einsum_narrow_matches_the_reference(dtype):
    a, b = draw((2, 30), dtype), draw((30, 4), dtype)
    want = (a.astype(float) @ b.astype(float)).astype(dtype)
    check_node("Einsum", [a, b], {"equation": "ij,jk"}, expected=[want], rtol=0.01, atol=0.01)


def test_many_operands_fold_from_the_left():
    shapes = [(2, 2)] * 30
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGH"
    terms = [(letters[i], letters[i + 1]) for i in range(30)]
    operands = [draw(s) for s in shapes]
    routine = EinsumLowering(terms, ("a", letters[30]), shapes, FLOAT32).routine()
    out = np.empty((2, 2), np.float32)
    routine.into(*operands, out, np.empty(routine.workspace, np.uint8))
    np.testing.assert_allclose(out, np.linalg.multi_dot(operands), rtol=1e-4)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", [(2, 3)]),
        ("ij->ik", [(2, 3)]),
        ("ij->ii", [(2, 3)]),
        ("ij", [(2, 3, 4)]),
        ("ijk", [(2, 3)]),
        ("i1", [(2, 3)]),
        ("......", [(2, 3)]),
        ("...i->i", [(2, 3)]),
        ("ij,jk->ik", [(2, 3), (4, 5)]),
        ("ii", [(2, 3)]),
    ],
)
def test_einsum_with_bad_inputs_is_refused(equation, shapes):
    with pytest.raises(ShapeError):
        check_node("Einsum", [draw(s) for s in shapes], {"equation": equation}, expected=[])


def test_infer_einsum_keeps_names():
    infer = find("Einsum").infer
    a = TensorType(FLOAT32, ("b", 4, "q", None))
    b = TensorType(FLOAT32, ("b", 4, "k", 64))
    attrs = {"equation": "bhqd,bhkd->bhqk"}
    assert infer([a, b], attrs, [None, None])[0].shape == ("b", 4, "q", "k")
    assert infer([a, b], {"equation": "bhqd,bhkd->bd"}, [None] * 2)[0].shape == ("b", 64)
    assert infer([a, TensorType()], attrs, [None, None])[0].shape is None
    assert parse_equation("a...b -> ...", 1).output == ("...",)
