"""Trains a named config: ``python train.py quickstart``; ``--help`` lists every setting."""

import os
import sys
import threading

from mecefo_jax.cli import main
from mecefo_jax.terminal import give_up_unwritable_output

if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    if any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        os._exit(exit_code)  # it hangs, and what it has registered for the end of the interpreter would wait for it
    sys.exit(exit_code)
