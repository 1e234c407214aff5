"""Makes a table of docs/results: ``python scripts/reproduce.py TABLE [--quick] [--jobs N]``.

Writes TABLE.md, TABLE.csv and TABLE.png. What is measured is in the CSV at once; started again after an interruption,
it goes on from there, and does nothing where all is done. ``--quick`` shows in minutes that everything works, with
numbers that mean nothing, and writes elsewhere. ``--so-far`` makes the table of what there is, and measures nothing.
"""

import argparse
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax.errors import RunError
from mecefo_jax.studies import STUDIES, markdown, runner
from mecefo_jax.terminal import integer

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(argv: Sequence[str]) -> int:
    """Make a table; returns the exit code."""
    options = _parser().parse_args(argv)
    study, folder = (
        STUDIES[options.table],
        options.out or (_ROOT / "runs" / "studies" / "quick" if options.quick else _ROOT / "docs" / "results"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    csv = folder / f"{options.table}.csv"
    cells = study.cells(options.quick)
    try:
        if not options.so_far:
            runner.run(study, cells, csv, options.workdir, options.jobs)
        rows, done = runner.measured(cells, csv)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted; what is done is in {csv}, and the same command goes on", file=sys.stderr)
        return 130
    if not rows:
        print(f"error: {csv} has no row of this study yet; start it without --so-far", file=sys.stderr)
        return 2
    command = shlex.join(["python", "scripts/reproduce.py", options.table, *(["--quick"] if options.quick else [])])
    figure = study.plot(rows)
    figure.savefig(csv.with_suffix(".png"), dpi=120)
    text = f"# {study.title}\n\n"
    if done < len(cells):
        text += f"**{done} of {len(cells)} parts are measured so far.**\n\n"
    text += f"{study.report(rows)}\n\n![{study.title}]({options.table}.png)\n\n"
    text += f"{markdown.provenance(rows, command)}. All rows: [{csv.name}]({csv.name}).\n"
    csv.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"wrote {csv.with_suffix('.md')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reproduce.py", description="Make a table of docs/results.", allow_abbrev=False
    )
    parser.add_argument("table", choices=STUDIES, metavar="TABLE", help=", ".join(STUDIES))
    parser.add_argument("--quick", action="store_true", help="as little as shows that it works, in runs/studies/quick")
    parser.add_argument("--so-far", action="store_true", help="write the table of what is there, measure nothing")
    parser.add_argument("--jobs", type=integer, default=os.cpu_count(), metavar="N", help="runs at a time (all cores)")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where to write (docs/results)")
    parser.add_argument(
        "--workdir", type=pathlib.Path, default=_ROOT / "runs" / "studies", metavar="DIR", help="for runs under way"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
