"""A tiny run in a process of its own, to be killed: ``killable_run.py CONFIG.json WORKDIR RECORDS.jsonl``.

Writes the record ids of every microbatch that a step asks for, before the step is computed.
"""

import json
import pathlib
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mecefo_jax import trainer
from mecefo_jax.config_file import read_config
from mecefo_jax.data import Sampler


def main() -> None:
    config_path, workdir, records_path = map(pathlib.Path, sys.argv[1:])
    config = read_config(config_path)
    jax.config.update("jax_num_cpu_devices", config.mesh.num_devices)
    record_ids = Sampler.record_ids
    with records_path.open("a", buffering=1) as records:

        def recorded(sampler, step, microbatch_id):
            ids = record_ids(sampler, step, microbatch_id)
            records.write(json.dumps([step, microbatch_id, ids.tolist()]) + "\n")
            return ids

        Sampler.record_ids = recorded
        trainer.run(config, workdir)


if __name__ == "__main__":
    main()
