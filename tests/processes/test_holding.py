"""What a process says of the step that it has computed."""

import numpy as np

from mecefo_jax.processes.agreement import Facts
from mecefo_jax.processes.holding import plan_of_what_was_done
from mecefo_jax.takeover import make_plan


def test_what_was_done_counts_by_the_levels_at_which_it_was_done():
    """Node 2 died in the step: what it had is computed by the others, further degraded than what they had before."""
    live_NS = np.array([[True], [True], [False]])
    plan = make_plan(live_NS, "balanced", microbatches_per_node=2, degraded_costs=[0.9, 0.5], slack=0.0)
    said = {0: Facts(life=1, exact=(0,), degraded={1: 1, 4: 2}), 1: Facts(life=1, exact=(2, 3), degraded={5: 2})}
    done = plan_of_what_was_done(plan, said)
    np.testing.assert_array_equal(done.level_MS[:, 0], [0, 1, 0, 0, 2, 2])
    np.testing.assert_array_equal(done.executor_M, [0, 0, 1, 1, 0, 1])
    np.testing.assert_allclose(done.load_NS[:, 0], [(1 + 0.9 + 0.5) / 2, (2 + 0.5) / 2, 0])
    missing = plan_of_what_was_done(plan, {0: said[0]})
    assert list(missing.dropped) == [2, 3, 5] and missing.critical_load == 1.2
