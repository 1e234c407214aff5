"""The policy ``auto``: which of the others takes over a failure, by predicted time and estimated gradient error.

A plan's *slowdown* is the extra time of its step, by its busiest unit's load, as a fraction of a healthy step. Its
*error* is the estimated distance of the step's gradient from the failure-free one, relative to the norm of the latter.
That of degraded microbatches grows with their share ``d`` of the work, those of a further level counting more; ``k``
dropped ones of ``M`` make a smaller sample, which is all that they cost:

    error^2 = (degraded_error d)^2 + sampling_error^2 k / (M (M - k))

Where it is not configured, ``degraded_error`` is the paper's pass's, or that of noise: a microbatch whose weight
gradients are made of a fraction ``f`` of the tokens has ``0.2 (1 / f - 1)^1.5`` of its own variance in addition, a fit
to what was measured at 1M parameters (docs/log.md).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mecefo_jax.config import AutoConfig, DegradedConfig

# Slowdowns are quotients of rounded loads: one this much above the limit is the limit.
_ROUNDING = 1e-9

_ERROR_OF_PAPERS_PASS = 1.2
_SAMPLED_VARIANCE, _SAMPLED_EXPONENT = 0.2, 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a policy's plan is expected to cost."""

    slowdown: float
    """Extra time of the step, as a fraction of a healthy one's."""
    error: float
    """Estimated relative error of the gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The policy that was chosen, and why."""

    policy: str
    reason: str
    prospects: Mapping[str, Prospect]
    """By policy, of those that have a plan at all."""


def with_degraded_error(settings: AutoConfig, switches: DegradedConfig, num_microbatches: int) -> AutoConfig:
    """The settings with an error of degrading: the configured one, or what these techniques come to by default.

    Args:
      settings: the errors of degrading and of sampling.
      switches: techniques of a degraded pass.
      num_microbatches: microbatches of the step.
    """
    if settings.degraded_error is not None:
        return settings
    error = 0.0
    if switches.skip_attention or switches.low_rank:
        error = _ERROR_OF_PAPERS_PASS
    elif switches.samples:
        variance = _SAMPLED_VARIANCE * (1 / switches.sampled_fractions[0] - 1) ** _SAMPLED_EXPONENT
        error = settings.sampling_error * math.sqrt(variance / num_microbatches)
    return dataclasses.replace(settings, degraded_error=error)


def estimate(
    *, critical_load: float, degradation: float, num_dropped: int, num_microbatches: int, settings: AutoConfig
) -> Prospect:
    """What a plan is expected to cost.

    Args:
      critical_load: load of its busiest unit, 1.0 being a healthy step.
      degradation: share of what it computes that is degraded, by microbatch and stage; cheaper levels count more.
      num_dropped: microbatches that it leaves out (k); fewer than all.
      num_microbatches: microbatches of the step (M).
      settings: the errors of degrading, if not configured the paper's pass's, and of sampling.
    """
    degraded_error = _ERROR_OF_PAPERS_PASS if settings.degraded_error is None else settings.degraded_error
    kept = num_microbatches - num_dropped
    sampling = settings.sampling_error * math.sqrt(num_dropped / (num_microbatches * kept))
    return Prospect(
        slowdown=max(critical_load - 1, 0.0),
        error=math.hypot(degraded_error * degradation, sampling),
    )


def choose(prospects: Mapping[str, Prospect], candidates: Sequence[str], max_slowdown: float) -> Choice:
    """The least error within ``max_slowdown``; where nothing is, the most progress a second. Of equals the first.

    Progress a second is 1 over ``(1 + slowdown) (1 + error^2)``: a gradient with a relative error of ``e``, were it
    noise, lowers the loss by ``1 / (1 + e^2)`` of what the exact one does, each at its best step size.

    Args:
      prospects: by policy.
      candidates: those of them that may be chosen; at least one.
      max_slowdown: extra time of a step that is accepted.
    """
    within = [name for name in candidates if prospects[name].slowdown <= max_slowdown + _ROUNDING]
    if within:
        policy = min(within, key=lambda name: (prospects[name].error, prospects[name].slowdown))
        reason = f"least error within {max_slowdown:g} of extra time"
    else:
        policy = min(candidates, key=lambda name: _time_for_progress(prospects[name]))
        reason = f"most progress a second, for nothing is within {max_slowdown:g} of extra time"
    return Choice(policy=policy, reason=reason, prospects=dict(prospects))


def _time_for_progress(prospect: Prospect) -> float:
    """Relative to a healthy step; rounded, so that equals are equal."""
    return round((1 + prospect.slowdown) * (1 + prospect.error**2), 9)
