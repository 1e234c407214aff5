"""Trains a named config: ``python train.py quickstart``; ``--help`` lists every setting."""

import sys

from mecefo_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
