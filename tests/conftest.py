"""Strict numerics for every test: no silent broadcasting of ranks, no silent dtype promotion, eight CPU devices."""

import jax
import matplotlib

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
matplotlib.use("Agg")
