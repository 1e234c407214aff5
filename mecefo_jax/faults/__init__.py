"""Fault sources answer who is alive at a step: scenarios, traces, scripts (NumPy only)."""

from mecefo_jax.faults.source import FaultSource, make_fault_source

__all__ = ["FaultSource", "make_fault_source"]
