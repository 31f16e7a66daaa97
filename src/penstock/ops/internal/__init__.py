"""Operations that only passes and front ends create."""

from __future__ import annotations

from importlib import import_module

from penstock.ir.op import Op

DOMAIN = "penstock"
INTERNAL = {
    **dict.fromkeys(("Append", "TripCount", "ZeroNaN"), "arrays"),
    **dict.fromkeys(("Attention", "PositionsBehind", "StackedAttention"), "attention"),
    "Case": "case",
    **dict.fromkeys(("GruCell", "GruGates", "GruState", "LstmCell"), "cells"),
    "ChosenMatMul": "chosen_product",
    "Fused": "fused",
    "PagedAttention": "pages",
    "Recurrence": "recurrence",
    **dict.fromkeys(("SearchEnd", "SearchStart", "SearchStep"), "search"),
    **dict.fromkeys(("Reorder", "Stack", "Transfer"), "transfer"),
}
"""the module of each operation of Penstock's own domain, which is not in the registry"""


def internal_operation(name: str, domain: str) -> Op | None:
    """The operation of Penstock's own domain with a given name, or None."""
    if domain != DOMAIN or name not in INTERNAL:
        return None
    module = vars(import_module(f"penstock.ops.internal.{INTERNAL[name]}"))
    operations = (x for x in module.values() if isinstance(x, Op) and x.domain == DOMAIN)
    return next(x for x in operations if x.name == name)
