"""Makes ``tf_saved/training.npz.xz``: SavedModels whose signature is a training step, and what a hundred
steps give in TensorFlow.

Needs TensorFlow (2.21) and Keras (3.15), as ``make.py`` does. Of each model there are ``name/file/...``
(the bytes of its files), ``name/in/...`` (the batches, a step takes one after the other) and
``name/out/...`` (the loss of each step, and the weights after the last).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from make import FOUND, F, save

STEPS = 100
BATCHES = 4
RNG = np.random.default_rng(7)
Update = Callable[[tf.Variable, tf.Tensor], None]


class Trained(tf.Module):
    """A network with its optimizer."""

    def __init__(
        self,
        network: keras.Model,
        loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        optimizer: Any,
        *shapes: tf.TensorSpec,
    ) -> None:
        super().__init__()
        self.network, self.loss, self.optimizer = network, loss, optimizer
        optimizer.build(network.trainable_variables)
        self.step = tf.function(self._step, input_signature=shapes, autograph=False)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.network(x, training=True))
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        weights = {f"w{i}": tf.identity(w) for i, w in enumerate(self.network.weights)}
        return {"loss": loss, **weights}


class ResourceApply(tf.Module):
    """An optimizer of the operations that apply a gradient to a variable."""

    def __init__(self, op: str, slots: int, *scalars: Any, **attrs: Any) -> None:
        super().__init__()
        self.op, self.count, self.scalars, self.attrs = op, slots, scalars, attrs
        self.slots: list[list[tf.Variable]] = []
        self.powers = [tf.Variable(0.9), tf.Variable(0.999)]  # of Adam's betas

    def build(self, variables: list[Any]) -> None:
        self.slots = [
            [tf.Variable(tf.zeros(v.shape)) for _ in range(self.count)] for v in variables
        ]

    def apply(self, gradients: list[tf.Tensor], variables: list[Any]) -> None:
        op, names = getattr(tf.raw_ops, f"ResourceApply{self.op}"), ARGUMENTS[self.op]
        powers = [p.read_value() for p in self.powers] if self.op == "Adam" else []
        for gradient, variable, slots in zip(gradients, variables, self.slots, strict=True):
            handles = [v.handle for v in (variable.value, *slots)]
            given = dict(zip(names, [*handles, *powers, *self.scalars], strict=True))
            gradient_name = "delta" if self.op == "GradientDescent" else "grad"
            op(**given, **{gradient_name: gradient}, **self.attrs)
        for power, beta in zip(self.powers, (0.9, 0.999), strict=True):
            power.assign(power * beta)


ARGUMENTS = {
    "GradientDescent": ["var", "alpha"],
    "Momentum": ["var", "accum", "lr", "momentum"],
    "KerasMomentum": ["var", "accum", "lr", "momentum"],
    "Adam": ["var", "m", "v", "beta1_power", "beta2_power", "lr", "beta1", "beta2", "epsilon"],
    "RMSProp": ["var", "ms", "mom", "lr", "rho", "momentum", "epsilon"],
}


def record(name: str, trained: Trained, batches: dict[str, np.ndarray]) -> None:
    """The files of a training step, and what a hundred steps give."""
    with TemporaryDirectory() as folder:
        tf.saved_model.save(trained, folder, signatures=trained.step)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and path.name != "fingerprint.pb":
                key = f"{name}/file/{path.relative_to(folder)}"
                FOUND[key] = np.frombuffer(path.read_bytes(), np.uint8)
    losses = []
    for i in range(STEPS):
        fed = {key: tf.constant(x[i % BATCHES]) for key, x in batches.items()}
        results = trained.step(**fed)
        losses.append(results.pop("loss").numpy())
    print(name, losses[0], losses[-1])
    FOUND[f"{name}/graph"] = np.empty(0, np.uint8)
    for key, x in batches.items():
        FOUND[f"{name}/in/{key}"] = x
    FOUND[f"{name}/out/loss"] = np.array(losses)
    for key, weight in results.items():
        FOUND[f"{name}/out/{key}"] = weight.numpy()


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=(BATCHES, *shape)).astype(F)


def mlp() -> tuple[Any, ...]:
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu"),
            layers.Dense(8, "elu"),
            layers.Dense(8, "softplus"),
            layers.Dense(8, "selu"),
            layers.Dense(8, "gelu"),
            layers.Dense(8, "leaky_relu"),
            layers.Dense(8, "softsign"),
            layers.Dense(8, "tanh"),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    labels = np.eye(3, dtype=F)[RNG.integers(0, 3, (BATCHES, 5))]
    return network, loss, real(5, 6), labels


def lstm() -> tuple[Any, ...]:
    layers = keras.layers
    network = keras.Sequential([keras.Input((7, 4)), layers.LSTM(5), layers.Dense(2)])
    return network, keras.losses.MeanSquaredError(), real(3, 7, 4), real(3, 2)


def convolutional() -> tuple[Any, ...]:
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input((9, 8, 2)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(2, padding="same"),
            layers.DepthwiseConv2D(3, strides=1),
            layers.AveragePooling2D(2, strides=1, padding="same"),
            layers.Conv2D(6, 3, strides=2, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = RNG.integers(0, 3, (BATCHES, 4)).astype(np.int32)
    return network, loss, real(4, 9, 8, 2), labels


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "GradientDescent": lambda: ResourceApply("GradientDescent", 0, 0.05),
    "Momentum": lambda: ResourceApply("Momentum", 1, 0.02, 0.9, use_nesterov=True),
    "KerasMomentum": lambda: ResourceApply("KerasMomentum", 1, 0.02, 0.8),
    "Adam": lambda: ResourceApply("Adam", 2, 0.002, 0.9, 0.999, 1e-7),
    "RMSProp": lambda: ResourceApply("RMSProp", 2, 0.001, 0.9, 0.5, 1e-7),
    "keras_SGD": lambda: keras.optimizers.SGD(0.02, 0.9, nesterov=True),
    "keras_Adam": lambda: keras.optimizers.Adam(0.002),
    "keras_RMSprop": lambda: keras.optimizers.RMSprop(0.003),
}

if __name__ == "__main__":
    for make, optimizers in (
        (mlp, OPTIMIZERS),
        (lstm, ("Adam", "Momentum", "keras_Adam")),
        (convolutional, ("RMSProp", "GradientDescent", "keras_SGD")),
    ):
        for optimizer in optimizers:
            keras.utils.set_random_seed(3)
            network, loss, x, y = make()
            specs = [tf.TensorSpec(v.shape[1:], v.dtype, n) for n, v in (("x", x), ("y", y))]
            trained = Trained(network, loss, OPTIMIZERS[optimizer](), *specs)
            record(f"{make.__name__}_{optimizer}", trained, {"x": x, "y": y})
    save("training", "tf_saved")
