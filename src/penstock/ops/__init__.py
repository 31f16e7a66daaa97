"""All operations, one file per family, imported when one of its operations is looked up."""

from penstock.ir.kernel import Kernel, asynchronous
from penstock.ir.op import Op
from penstock.ops.registry import find, operator, registered

__all__ = ["Kernel", "Op", "asynchronous", "find", "operator", "registered"]
