"""Failures that happen: nodes are processes, and the runtime says which of them are alive."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Bool


def live_nodes(num_nodes: int, nodes: Collection[int]) -> Bool[np.ndarray, "N 1"]:
    """These nodes as a fault source says them."""
    live_NS = np.zeros((num_nodes, 1), bool)
    live_NS[sorted(nodes)] = True
    return live_NS


class LiveFailures:
    """A fault source that is told what was found (``processes/node.py``)."""

    num_stages = 1

    def __init__(self, num_nodes: int) -> None:
        """All nodes live until something else is found."""
        self.num_nodes = num_nodes
        self._found: list[tuple[int, Bool[np.ndarray, "N 1"]]] = []

    def found(self, step: int, nodes: Collection[int]) -> None:
        """Note that from ``step`` on these nodes live and no others."""
        self._found = [(earlier, live_NS) for earlier, live_NS in self._found if earlier < step][-1:]
        self._found.append((step, live_nodes(self.num_nodes, nodes)))

    def live(self, step: int) -> Bool[np.ndarray, "N 1"]:
        """Units live at ``step``, the one being trained or the one before, as far as is known by now."""
        known = [live_NS for since, live_NS in self._found if since <= step]
        return known[-1] if known else np.ones((self.num_nodes, 1), bool)
