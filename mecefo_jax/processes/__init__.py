"""Nodes as operating-system processes that really die, on the multi-controller runtime of JAX."""
