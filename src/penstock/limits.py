"""Bounds on what a model may ask for, so that a file cannot exhaust the machine that reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds checked while a model is loaded, compiled and run. ``None`` means no bound.

    Exceeding one raises ``InvalidModel`` while loading, and ``LimitExceeded`` in a compile or run.
    """

    max_nodes: int | None = 5_000_000
    """nodes over all graphs of a model, function bodies expanded"""
    max_depth: int = 64
    """how deep graphs and functions may nest"""
    max_dims: int = 64
    """dims of one tensor, NumPy's own bound"""
    max_elements: int = 2**62
    """elements of one tensor: a product of dims beyond it would overflow byte counts"""
    max_bytes: int | None = None
    """bytes of all arenas and plans of a session; also the most that one planned tensor may take"""
    max_constant_bytes: int | None = None
    """bytes of all constants of a model"""
    max_iterations: int | None = None
    """iterations of one Loop, While or Scan"""
    max_folded_bytes: int = 16 * 2**20
    """constant folding never makes a constant above this that is larger than what it replaces"""
    max_plans_bytes: int = 512 * 2**20
    """bytes of the plans a session keeps, by shapes of their inputs; the oldest are dropped"""


DEFAULT_LIMITS = Limits()
