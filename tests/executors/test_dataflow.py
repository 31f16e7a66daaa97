"""The dataflow executor."""

from tests.executors.conformance import ExecutorConformance


class TestDataflow(ExecutorConformance):
    executor = "dataflow"
