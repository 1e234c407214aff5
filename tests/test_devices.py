"""Environments without a device: one line says what was asked for and what to set."""

import os
import subprocess
import sys

import pytest

CODE = """
from mecefo_jax import devices
from mecefo_jax.config import MeshConfig
from mecefo_jax.errors import ConfigError
try:
    devices.prepare(MeshConfig(num_nodes=1))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "environment",
    [{"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "nowhere"}, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "0"}],
)
def test_no_device_is_one_line_that_names_the_environment(environment):
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=clean | hidden | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("JAX finds no device: ")
    assert f"got {' '.join(f'{name}={value}' for name, value in environment.items())} in the environment" in line
    assert "set JAX_PLATFORMS=cpu" in line
