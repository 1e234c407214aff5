"""MeCeFO's degraded backward pass: skip, recompute, low rank; one technique a file, joined in ``block``.

The forward pass is always exact. ``basis`` maintains what the low-rank technique projects on.
"""
