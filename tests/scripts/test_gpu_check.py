"""The check of an accelerator: a dry run on CPU, and what it makes of parts that fail."""

import json

import jax.numpy as jnp
import pytest

from mecefo_jax import cli
from mecefo_jax.bench import numerics
from mecefo_jax.model import init_model
from scripts import gpu_check


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_dry_run_measures_everything(tmp_path, capfd):
    file = tmp_path / "check.json"
    assert gpu_check.main([str(file), "--tiny", "--budget", "900"]) == 0
    results = json.loads(file.read_text())
    assert set(results) == {"numerics", "tiny", "seconds"}
    for dtype in ("float32", "bfloat16"):
        claims = {claim["name"]: claim for claim in results["numerics"][dtype]}
        assert len(claims) == 8 and all(claim["holds"] for claim in claims.values())
    tiny = results["tiny"]
    assert tiny["dtype"] == "float32" and tiny["layers"] == 2
    assert tiny["cost_over_flops"] == pytest.approx(tiny["degraded_cost"] / tiny["degraded_flops"])
    positive = ("step_s", "tokens_per_s", "healthy_overhead", "refresh_cost_svd", "refresh_cost_subspace")
    assert all(tiny[name] > 0 for name in positive)
    assert "mfu" not in tiny, "the peak of a CPU is not known"
    assert "16 of 16 claims hold" in capfd.readouterr().out


def test_bases_that_are_none_are_found_out(monkeypatch):
    params = init_model(numerics._config("float32", 32).model, 512, 0)
    right = numerics.subspace_iteration
    monkeypatch.setattr(numerics, "subspace_iteration", lambda *arguments: 1.01 * right(*arguments))
    errors = numerics._basis_errors(params)
    assert errors["bases are orthonormal"] > 1e-2
    monkeypatch.setattr(numerics, "subspace_iteration", lambda w, v, n: jnp.roll(right(w, v, n), 1, axis=0))
    errors = numerics._basis_errors(params)
    assert errors["bases are orthonormal"] < 1e-4 < errors["bases by iteration hold what those by SVD do"]


def test_parts_that_fail_are_told(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(gpu_check, "_SPEED", "import sys; print('out of memory', file=sys.stderr); sys.exit(3)")
    file = tmp_path / "check.json"
    assert gpu_check.main([str(file), "--tiny"]) == 1
    results = json.loads(file.read_text())
    assert results["numerics"] == results["tiny"] == {"failed": "exit code 3: out of memory"}
    assert gpu_check.main([str(file), "--tiny", "--budget", "0"]) == 1
    assert json.loads(file.read_text())["tiny"] == {"failed": "no time was left"}
    capfd.readouterr()


def test_what_was_measured_before_the_time_ran_out_is_kept(monkeypatch):
    script = "import sys, time; open(sys.argv[1], 'w').write('{\"mfu\": 0.5}'); time.sleep(600)"
    monkeypatch.setattr(gpu_check, "_SPEED", script)
    part = gpu_check.run_part(["speed"], 2.0)
    assert part == {"mfu": 0.5, "failed": "it ran out of time"}
    assert gpu_check.describe(part) == "mfu 0.5, FAILED: it ran out of time"


def test_claims_decide():
    claim = {"name": "x", "error": 1.0, "bound": 0.5, "holds": False}
    assert not gpu_check.all_well({"numerics": {"float32": [claim]}, "seconds": 1.0})
    assert gpu_check.all_well({"numerics": {"float32": [claim | {"holds": True}]}, "seconds": 1.0})
    assert not gpu_check.all_well({"numerics": {}})
    assert "NOT: x" in gpu_check.describe({"float32": [claim]})


def test_the_real_parts_are_runs_of_the_paper_on_one_node():
    parts = gpu_check.parts(False)
    assert list(parts) == ["numerics", "350M", "1B", "7B, 8 of 32 layers"]
    for words in list(parts.values())[1:]:
        config, _ = cli.parse(words[1:])
        assert (config.mesh.num_nodes, config.model.compute_dtype, config.model.vocab_size) == (1, "bfloat16", 32_000)
