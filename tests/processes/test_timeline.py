"""What is told of a takeover where nodes are processes: the same as where they are emulated."""

import numpy as np

from mecefo_jax.config import AutoConfig
from mecefo_jax.processes.timeline import Timeline
from mecefo_jax.progress import Progress
from mecefo_jax.takeover import make_plan


class Told:
    """Keeps what it is told."""

    def __init__(self):
        self.events = []

    def event(self, kind, step, **fields):
        self.events.append({"kind": kind, "step": step, **fields})


def test_a_takeover_says_what_auto_chose_and_why():
    live_NS = np.array([[True], [False], [True], [True]])
    told, settings = Told(), {"microbatches_per_node": 4, "degraded_costs": [0.6], "slack": 0.0}
    timeline = Timeline(Progress(), told)
    for policy in ("auto", "drop"):
        plan = make_plan(live_NS, policy, **settings, auto=AutoConfig(max_slowdown=0.5))
        timeline.takeover(7, plan, [0, 2, 3])
    chosen, fixed = told.events
    assert (chosen["policy"], chosen["live_nodes"], chosen["taken_over"]) == ("reroute", 3, 4)
    assert chosen["chosen_for"] == "least error within 0.5 of extra time"
    assert chosen["prospects"]["reroute"] == {"slowdown": 0.5, "error": 0.0}
    assert (fixed["policy"], fixed["dropped"]) == ("drop", 4) and "chosen_for" not in fixed
