"""Measurements of what fault tolerance costs: time against an ordinary step, operations and memory by compilation."""
