"""Prepares the text of a named config ahead of time: ``python scripts/prepare_data.py NAME [--data.field VALUE ...]``.

Takes the command line of train.py, and leaves in ``data.cache_dir`` what a run of the same config will open.
"""

import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax.cli import parse
from mecefo_jax.data import check_vocabulary, prepare
from mecefo_jax.errors import RunError
from mecefo_jax.terminal import give_up_unwritable_output


def main(argv: Sequence[str]) -> int:
    """Prepare the data and return the exit code."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    try:
        config, _ = parse(argv)
        prepared = prepare(config.data)
        if config.model.vocab_size is not None:
            check_vocabulary(prepared, config.model.vocab_size)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
