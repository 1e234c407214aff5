"""Speed of a run: throughput of committed tokens, model FLOP utilization, and XLA compilations."""

import functools
import time

import jax

# Dense bfloat16 peak, FLOP/s of one device, from the vendors' data sheets; the key is a part of ``device_kind``.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Peak bfloat16 FLOP/s of a device; None where it is not known."""
    return next((peak for kind, peak in _PEAK_FLOPS.items() if kind in device.device_kind), None)


@functools.cache
def compilation_counter() -> "CompilationCounter":
    """The one counter of this process."""
    return CompilationCounter()


class CompilationCounter:
    """Counts XLA compilations of this process from its making on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **_: object) -> None:
        del duration_secs
        self.count += event == "/jax/core/compile/backend_compile_duration"


class Throughput:
    """Tokens per second between two readings: tokens committed, over wall time without pauses."""

    def __init__(self, flops_per_token: float, num_devices: int, device_peak: float | None):
        """Start the clock.

        Args:
            flops_per_token: of the exact forward and backward pass, without recomputation.
            num_devices: devices of the whole run, idle ones included.
            device_peak: FLOP/s of one; None: utilization is left out.
        """
        self._flops_per_token = flops_per_token
        self._peak = None if device_peak is None else device_peak * num_devices
        self._start = self._ended = time.perf_counter()
        self._tokens = self._steps = 0

    def committed(self, tokens: int, ended: float) -> None:
        """Count a committed step.

        Args:
            tokens: of the step.
            ended: ``time.perf_counter()`` at its end, or at the dispatch of the step after it. The time of reading a
                result would not do: it comes one step late, or at once before a save.
        """
        self._tokens += tokens
        self._steps += 1
        self._ended = ended

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training, such as an evaluation."""
        self._start += seconds

    def read(self) -> dict[str, float]:
        """Metrics since the last reading; empty if no step was committed."""
        seconds, tokens, steps = self._ended - self._start, self._tokens, self._steps
        if not steps:
            return {}
        self._start, self._tokens, self._steps = self._ended, 0, 0
        metrics = {"perf/step_time_s": seconds / steps, "perf/tokens_per_s": tokens / seconds}
        if self._peak is not None:
            metrics["perf/mfu"] = tokens / seconds * self._flops_per_token / self._peak
        return metrics
