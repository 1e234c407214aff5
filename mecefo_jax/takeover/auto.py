"""The policy ``auto``: which of the others takes over a failure, by predicted time and estimated gradient error.

A plan's *slowdown* is the extra time of its step, by its busiest unit's load, as a fraction of a healthy step. Its
*error* is the estimated distance of the step's gradient from the failure-free one, relative to the norm of the latter:

    error^2 = (degraded d)^2 + sampling^2 (v / K + k / (M K)),  K = M - k

The first term is a bias, and grows with the share ``d`` of the work that is degraded, further levels counting more.
The others are noise: ``sampling`` is the relative deviation of one microbatch's gradient, ``v`` the variance that
samples of the tokens add to it, in its own, on average over what is computed, and ``k`` of ``M`` microbatches are
dropped, which makes a smaller sample.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mecefo_jax.config import AutoConfig, DegradedConfig

# Slowdowns are quotients of rounded loads: one this much above the limit is the limit.
_ROUNDING = 1e-9

_ERROR_OF_PAPERS_PASS = 1.2
# Fits to what was measured at 1M parameters (docs/log.md).
_SAMPLED_VARIANCE, _SAMPLED_EXPONENT = 0.2, 1.5
_WITH_SAMPLED_FFN = 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """What takeovers do to a gradient, all relative to its norm."""

    degraded: float
    """Bias if all microbatches are degraded, at the first level."""
    level_variances: tuple[float, ...]
    """Variance that a degraded microbatch has in addition, by level from 1 on, in that of an exact one's gradient;
    empty: none at any level."""
    sampling: float
    """Standard deviation of one microbatch's gradient."""


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


def expected_errors(settings: AutoConfig, switches: DegradedConfig) -> Errors:
    """What is configured, or else what a degraded pass of these techniques comes to.

    The paper's techniques have a bias. A microbatch whose weight gradients are made of a fraction ``f`` of the tokens
    has ``0.2 (1 / f - 1)^1.5`` of its own variance in addition, 1.3 times that with ``sample_ffn``.
    """
    bias, variances = settings.degraded_error, ()
    if bias is None and (switches.skip_attention or switches.low_rank):
        bias = _ERROR_OF_PAPERS_PASS
    elif bias is None:
        factor = _SAMPLED_VARIANCE * (_WITH_SAMPLED_FFN if switches.sample_ffn else 1)
        variances = tuple(factor * (1 / f - 1) ** _SAMPLED_EXPONENT for f in switches.sampled_fractions)
    return Errors(degraded=bias or 0.0, level_variances=variances, sampling=settings.sampling_error)


def estimate(
    *,
    critical_load: float,
    degradation: float,
    level_variance: float,
    num_dropped: int,
    num_microbatches: int,
    errors: Errors,
) -> Prospect:
    """What a plan is expected to cost.

    Args:
      critical_load: load of its busiest unit, 1.0 being a healthy step.
      degradation: share of what it computes that is degraded, by microbatch and stage; cheaper levels count more (d).
      level_variance: mean over what it computes of ``errors.level_variances`` (v).
      num_dropped: microbatches that it leaves out (k); fewer than all.
      num_microbatches: microbatches of the step (M).
      errors: of degrading and of sampling.
    """
    kept = num_microbatches - num_dropped
    noise = errors.sampling * math.sqrt(level_variance / kept + num_dropped / (num_microbatches * kept))
    return Prospect(slowdown=max(critical_load - 1, 0.0), error=math.hypot(errors.degraded * degradation, noise))


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
