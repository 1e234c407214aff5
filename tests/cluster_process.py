"""One process of a cluster for tests: as ``train.py``, but it can be made to hang or to dawdle.

``cluster_process.py FOLDER [train.py's arguments]``. A process sleeps for ever in its data loader while the file
``FOLDER/asleep-PROCESS`` exists, and takes its time for each microbatch while ``FOLDER/slow`` does; it starts,
compiles and ends late by the seconds in ``FOLDER/late-start-PROCESS``, ``FOLDER/late-compile-PROCESS`` and
``FOLDER/late-end-PROCESS``.
"""

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mecefo_jax import cli


def main() -> int:
    folder, argv = pathlib.Path(sys.argv[1]), sys.argv[2:]
    process = argv[argv.index("--cluster.process-id") + 1]

    def dawdle(what: str) -> None:
        path = folder / f"late-{what}-{process}"
        if path.exists():
            time.sleep(float(path.read_text()))

    dawdle("start")
    if process != "0":
        from mecefo_jax.data import Sampler
        from mecefo_jax.processes import start
        from mecefo_jax.processes.worker import Worker

        microbatch, compile_programs, take_part = Sampler.microbatch, Worker.compile, start.take_part

        def read_or_sleep(self, step, microbatch_id):
            while (folder / f"asleep-{process}").exists():
                time.sleep(0.1)
            if (folder / "slow").exists():
                time.sleep(0.08)
            return microbatch(self, step, microbatch_id)

        def compile_late(self):
            dawdle("compile")
            compile_programs(self)

        def end_late(parts, stop):
            take_part(parts, stop)
            dawdle("end")

        Sampler.microbatch, Worker.compile, start.take_part = read_or_sleep, compile_late, end_late
    return cli.main(argv)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
