"""``launchable.py FOLDER [launcher's arguments]``: the launcher, with stand-ins in place of the processes of a run."""

import pathlib
import signal
import sys

from mecefo_jax import launch

STAND_IN = pathlib.Path(__file__).parent / "processes" / "stand_in.py"
SUPERVISOR = launch.Supervisor


def supervisor_of_stand_ins(commands, *, limits):
    def stand_ins(address):
        return [
            [sys.executable, "-S", str(STAND_IN), sys.argv[1], str(process), address]
            for process, _ in enumerate(commands(address))
        ]

    return SUPERVISOR(stand_ins, limits=limits)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    launch.Supervisor = supervisor_of_stand_ins
    sys.exit(launch.main(sys.argv[2:]))
