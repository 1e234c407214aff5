"""Trains a named config: ``python train.py quickstart``; ``--help`` lists every setting."""

import sys

from mecefo_jax.cli import main
from mecefo_jax.terminal import give_up_unwritable_output

if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
