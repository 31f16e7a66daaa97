"""Makes ``matrices.npz.xz``, as ``make.py`` does ``cases.npz.xz``: decompositions, Fourier
transforms along several axes, and recurrent cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from make import F, case, real, save, several


def positive(*shape: int) -> np.ndarray:
    """Matrices with positive eigenvalues."""
    x = real(*shape)
    return np.asarray(x @ x.swapaxes(-1, -2) + 3 * np.eye(shape[-1], dtype=F), F)


def decompositions() -> None:
    x, y = positive(2, 3, 3), real(2, 3, 2)
    for name in ("Cholesky", "MatrixDeterminant", "LogMatrixDeterminant"):
        case(name, name, {"input": x})
        case(f"{name}_none_dynamic", name, {"input": x[:0]})
    case("MatrixDeterminant_double", "MatrixDeterminant", {"input": real(4, 4).astype(float)})
    complex_x = (real(3, 3) + 1j * real(3, 3)).astype(np.complex64)
    for adjoint in (False, True):
        case(f"MatrixInverse_{adjoint}", "MatrixInverse", {"input": complex_x}, adjoint=adjoint)
        sides = {"matrix": x + real(2, 3, 3), "rhs": y}
        case(f"MatrixSolve_{adjoint}", "MatrixSolve", sides, adjoint=adjoint)
        for lower in (False, True):
            triangular = {"adjoint": adjoint, "lower": lower}
            label = f"MatrixTriangularSolve_{adjoint}_{lower}"
            case(label, "MatrixTriangularSolve", sides, **triangular)
    broadcast = {"matrix": x[0], "rhs": y}
    case("MatrixTriangularSolve_dynamic", "MatrixTriangularSolve", broadcast)
    several("SelfAdjointEigV2_values", lambda input: [tf.linalg.eigvalsh(input)], {"input": x})
    values = lambda input: [tf.linalg.svd(input, compute_uv=False)]  # noqa: E731
    several("Svd_values", values, {"input": y})

    def eigen(input: tf.Tensor) -> list[tf.Tensor]:
        values, vectors = tf.linalg.eigh(input)
        return [values, vectors @ tf.linalg.diag(values) @ tf.linalg.adjoint(vectors)]

    def singular(input: tf.Tensor, full: bool = False) -> list[tf.Tensor]:
        s, u, v = tf.linalg.svd(input, full_matrices=full)
        n = s.shape[-1]
        return [s, u[..., :n] @ tf.linalg.diag(s) @ tf.linalg.adjoint(v[..., :n])]

    several("SelfAdjointEigV2", eigen, {"input": x})
    several("Svd", singular, {"input": y})
    several("Svd_full", lambda input: singular(input, full=True), {"input": y})
    for full in (False, True):

        def triangles(input: tf.Tensor, full: bool = full) -> list[tf.Tensor]:
            q, r = tf.linalg.qr(input, full_matrices=full)
            return [tf.abs(r), q @ r]

        several(f"Qr_{full}", triangles, {"input": y})


def transforms() -> None:
    for rank, end in ((2, "2D"), (3, "3D")):
        x = real(2, 3, 4, 6)
        z = (x + 1j * real(2, 3, 4, 6)).astype(np.complex64)
        case(f"FFT{end}", f"FFT{end}", {"input": z})
        whole = z.astype(np.complex128)
        case(f"IFFT{end}_dynamic", f"IFFT{end}", {"input": whole})
        for name, sizes in (("same", [3, 4, 6]), ("other", [2, 3, 5])):
            length = {"fft_length": np.array(sizes[-rank:], np.int32)}
            case(f"RFFT{end}_{name}", f"RFFT{end}", {"input": x}, **length)
            case(f"IRFFT{end}_{name}", f"IRFFT{end}", {"input": z[..., :4]}, **length)


def cells() -> None:
    batch, inputs, n = 2, 3, 4
    states = {"cs_prev": real(batch, n), "h_prev": real(batch, n)}
    weights: dict[str, Any] = {"w": real(inputs + n, 4 * n), "b": real(4 * n)}
    weights |= {name: real(n) for name in ("wci", "wcf", "wco")}
    for name, more in (
        ("plain", {"forget_bias": 0.5, "cell_clip": 0.0}),
        ("peephole_dynamic", {"use_peephole": True, "cell_clip": 0.7}),
    ):
        one = {"x": real(batch, inputs), **states}
        case(f"LSTMBlockCell_{name}", "LSTMBlockCell", one, **weights, **more)
        whole = {"x": real(5, batch, inputs), **states}
        for steps in (5, 3):
            length = {"seq_len_max": np.int64(steps)}
            case(f"BlockLSTM_{steps}_{name}", "BlockLSTM", whole, **length, **weights, **more)
        second = {key: value for key, value in more.items() if key != "forget_bias"}
        given = {**weights, **second, "seq_len_max": np.int64(5)}
        case(f"BlockLSTMV2_{name}", "BlockLSTMV2", whole, **given)
    gates = {"w_ru": real(inputs + n, 2 * n), "w_c": real(inputs + n, n)}
    biases = {"b_ru": real(2 * n), "b_c": real(n)}
    given = {"x": real(batch, inputs), "h_prev": states["h_prev"]}
    case("GRUBlockCell", "GRUBlockCell", given, **gates, **biases)


if __name__ == "__main__":
    for make in (decompositions, transforms, cells):
        make()
    save("matrices")
