"""The linear executor."""

from tests.executors.conformance import ExecutorConformance


class TestLinear(ExecutorConformance):
    executor = "linear"
