"""Operations that only passes and front ends create."""

from __future__ import annotations

from importlib import import_module

from penstock.ir.op import Op

DOMAIN = "penstock"
INTERNAL = {
    "Append": "arrays.APPEND",
    "Attention": "attention.ATTENTION",
    "Case": "case.CASE",
    "ChosenMatMul": "chosen_product.CHOSEN_MATMUL",
    "Fused": "fused.FUSED",
    "GruCell": "cells.GRU_CELL",
    "GruGates": "cells.GRU_GATES",
    "GruState": "cells.GRU_STATE",
    "LstmCell": "cells.LSTM_CELL",
    "PagedAttention": "pages.PAGED_ATTENTION",
    "Recurrence": "recurrence.RECURRENCE",
    "Reorder": "transfer.REORDER",
    "SearchEnd": "search.SEARCH_END",
    "SearchStart": "search.SEARCH_START",
    "SearchStep": "search.SEARCH_STEP",
    "Stack": "transfer.STACK",
    "StackedAttention": "attention.STACKED_ATTENTION",
    "Transfer": "transfer.TRANSFER",
    "TripCount": "arrays.TRIP_COUNT",
    "ZeroNaN": "arrays.ZERO_NAN",
}
"""The operations of Penstock's own domain by name, which stand in no registry"""


def internal_operation(name: str, domain: str) -> Op | None:
    """The operation of Penstock's own domain with this name; None if there is none."""
    if domain != DOMAIN or name not in INTERNAL:
        return None
    module, _, constant = INTERNAL[name].partition(".")
    operation: Op = getattr(import_module(f"penstock.ops.internal.{module}"), constant)
    return operation
