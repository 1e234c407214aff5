"""Compares runs on one page: ``python scripts/report.py RUN... [--out report.html]``; the page needs no network."""

import argparse
import datetime
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.html_report import page
from mecefo_jax.recorded_run import open_runs
from mecefo_jax.terminal import give_up_unwritable_output, tolerate_encoding


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code."""
    parser = argparse.ArgumentParser(description="Compares runs, finished or not, on one HTML page.")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run directory")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("report.html"), help="the page to write")
    arguments = parser.parse_args(argv)
    tolerate_encoding()
    try:
        text = page(open_runs(arguments.runs), datetime.datetime.now(datetime.UTC))
        try:
            arguments.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {arguments.out}: cannot be written ({error.strerror}); name another") from error
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(arguments.out)
    return 0


if __name__ == "__main__":
    exit_code = main()
    give_up_unwritable_output()
    sys.exit(exit_code)
