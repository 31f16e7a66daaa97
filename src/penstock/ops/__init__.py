"""All operations, one file per family, imported when one of its operations is looked up."""

from penstock.ir.op import Kernel, Op, asynchronous
from penstock.ops.registry import find, operator, registered

__all__ = ["Kernel", "Op", "asynchronous", "find", "operator", "registered"]
