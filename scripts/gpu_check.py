"""What ``gpu_check.sh`` runs: numerics, then speed at the paper's sizes, within a budget of time, into one JSON file.

Each part is a process of its own, so that one that runs out of memory or time leaves the others alone; what is not
reached within the budget is named in the file.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

_BUDGET_S = 480.0
_SPEED = "import sys; sys.path[:0] = ['.']; from mecefo_jax.bench import accelerator; accelerator.main(sys.argv[1:])"


def main(argv: Sequence[str]) -> int:
    """Run all parts; returns 0 if every claim about numerics holds and every part was measured."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("json", type=pathlib.Path, nargs="?", default=pathlib.Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--budget", type=float, default=_BUDGET_S, metavar="S", help="seconds in all (default: 480)")
    options = parser.parse_args(argv)
    began, results = time.monotonic(), dict[str, Any]()
    for name, words in parts(options.tiny).items():
        left = options.budget - (time.monotonic() - began)
        results[name] = run_part(words, left) if left > 0 else {"failed": "no time was left"}
        print(f"{name}: {describe(results[name])}", flush=True)
        results["seconds"] = round(time.monotonic() - began, 1)
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")  # so far
    return 0 if all_well(results) else 1


def parts(tiny: bool) -> dict[str, list[str]]:
    """Arguments of each part, the most important first."""
    if tiny:
        return {
            "numerics": ["numerics", "--hidden-size", "32"],
            "tiny": ["speed", "quickstart", "--seconds", "1", *_TINY],
        }
    one_node = ["--mesh.num_nodes", "1", "--model.compute_dtype", "bfloat16"]
    return {
        "numerics": ["numerics", "--hidden-size", "512"],
        "350M": ["speed", "llama_350m", *one_node],
        "1B": ["speed", "llama_1b", *one_node, "--train.microbatch_size", "8"],
        # A quarter of the layers: all of them, with gradients and moments, would need 108 GB and more.
        "7B, 8 of 32 layers": ["speed", "llama_7b", *one_node, "--model.num_layers", "8", "--model.remat", "none"],
    }


_TINY = [
    *("--mesh.num_nodes", "1", "--model.hidden_size", "32", "--model.ffn_size", "48", "--model.num_layers", "2"),
    *("--model.num_heads", "2", "--data.seq_len", "16", "--basis.rank", "4"),
]


def run_part(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """The part's results, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "part.json"
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _SPEED, str(out), *words],
                cwd=_ROOT,
                env=environment,
                timeout=seconds,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            done = None
        if out.exists():  # what was measured before it ended, however it did
            found = json.loads(out.read_text())
            return found if done is not None and done.returncode == 0 else found | {"failed": _why(done)}
        return {"failed": _why(done)}


def _why(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "it ran out of time"
    return f"exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}"


def all_well(results: dict[str, Any]) -> bool:
    """Whether nothing failed and every claim holds."""
    found = [part for part in results.values() if isinstance(part, dict)]
    claims = [claim for dtype in ("float32", "bfloat16") for claim in results["numerics"].get(dtype, [])]
    return bool(claims) and all(claim["holds"] for claim in claims) and not any("failed" in part for part in found)


def describe(part: dict[str, Any]) -> str:
    """One line of a part's results."""
    claims = [claim for dtype in ("float32", "bfloat16") for claim in part.get(dtype, [])]
    shown = [f"{sum(claim['holds'] for claim in claims)} of {len(claims)} claims hold"] if claims else []
    shown += [f"NOT: {claim['name']}" for claim in claims if not claim["holds"]]
    shown += [f"{name} {value:.3g}" for name, value in part.items() if isinstance(value, float)]
    shown += [f"FAILED: {part['failed']}"] if "failed" in part else []
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
