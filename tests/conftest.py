"""Strict numerics for every test: no silent broadcasting of ranks, no silent dtype promotion, eight CPU devices."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as mecefo_jax/devices.py does, before JAX loads its libraries

import hypothesis
import jax
import matplotlib

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
matplotlib.use("Agg")
# A first example may compile, and machines differ: time is no property of the code under test.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")
