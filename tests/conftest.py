"""Strict numerics for every test: no silent broadcasting of ranks, no silent dtype promotion, eight CPU devices."""

import gc
import os
import pathlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as mecefo_jax/devices.py does, before JAX loads its libraries

import hypothesis
import jax
import matplotlib
import pytest

from mecefo_jax import executor

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
matplotlib.use("Agg")
# Most of the time of tests is XLA's, and half of that goes into optimizations from which a test is too short to profit.
_quick = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # later ones do not know it
    _quick.append("--xla_cpu_use_fusion_emitters=false")
QUICK_TO_COMPILE = " ".join([os.environ.get("XLA_FLAGS", ""), *_quick])
with pytest.MonkeyPatch.context() as environment:  # XLA reads its flags once
    environment.setenv("XLA_FLAGS", QUICK_TO_COMPILE)
    jax.devices()
# A first example may compile, and machines differ: time is no property of the code under test.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

_MOST_MAPS = 20_000


@pytest.fixture
def quick_processes(monkeypatch):
    """Processes that a test starts compile as it does; others run as a user's would."""
    monkeypatch.setenv("XLA_FLAGS", QUICK_TO_COMPILE)


@pytest.fixture(autouse=True, scope="module")
def _few_executables():
    """Each executable maps pieces of memory; Linux allows a process 65,530, and XLA aborts without more."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MOST_MAPS:
        executor.programs_for.cache_clear()
        executor._reduction.cache_clear()
        jax.clear_caches()
        gc.collect()
