"""Fine-tunes a trained model on a task in GLUE's format, while nodes fail: ``finetune.py RUN_DIR --task DIR``.

Settings of the sections ``faults``, ``degraded`` and ``basis`` are taken as ``train.py`` takes them; the latter two are
those of the run unless given. docs/operations.md says more.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax import devices  # first, for it sets what JAX reads when it is imported

# isort: split
from mecefo_jax.cli import scan
from mecefo_jax.config import Config, FaultsConfig, MeshConfig
from mecefo_jax.config_effects import without_effect
from mecefo_jax.config_file import flatten, from_dict, to_dict
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.finetune.loop import fine_tune
from mecefo_jax.finetune.settings import Settings
from mecefo_jax.finetune.tasks import open_task
from mecefo_jax.takeover.plan import POLICIES
from mecefo_jax.terminal import give_up_unwritable_output, integer, number, tolerate_encoding
from mecefo_jax.trained import open_trained

_SECTIONS = ("faults", "degraded", "basis")
_SCENARIOS = ("none", "low", "mid", "high", "steps", "persistent", "trace", "script")


def main(argv: Sequence[str]) -> int:
    """Fine-tune; returns the exit code, with one line on standard error where it is not 0."""
    tolerate_encoding()
    options, words = make_parser().parse_known_args(argv)
    try:
        summary = run(options, words)
        if options.json is not None:
            options.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the best epoch so far is kept, and the rest is lost", file=sys.stderr)
        return 130
    print(f"best epoch {summary['best_epoch']}: {summary['metric']} {summary['best']:.4f}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags; one that is not given leaves the default of ``Settings``."""
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune a trained model on a task in GLUE's format, while nodes fail.",
        usage="%(prog)s RUN_DIR --task DIR|glue/NAME [options] [--faults.field VALUE ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN_DIR", help="run directory of the trained model")
    parser.add_argument("--task", required=True, metavar="DIR|glue/NAME", help="folder with train and dev, or dataset")
    parser.add_argument("--step", type=integer, metavar="N", default=None, help="checkpoint (the newest)")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=None, help="(RUN_DIR/finetune/NAME)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", default=None, help="also write the summary there")
    for flag, kind, text in (
        ("epochs", integer, "times that each example is trained on"),
        ("batch-size", integer, "sequences of a step, over all nodes"),
        ("learning-rate", number, "peak; warm-up over a tenth of the steps, then a linear decay to zero"),
        ("seed", integer, "of the head, of the order of examples and of failures"),
        ("nodes", integer, "nodes, which fail"),
        ("devices", integer, "devices that the nodes share, one a node at most (all)"),
        ("microbatches-per-node", integer, "microbatches of a node in a healthy step"),
        ("max-length", integer, "tokens of an example (data.seq_len of the run)"),
    ):
        default = getattr(Settings, flag.replace("-", "_"))
        shown = "" if default is None else f" ({default})"
        parser.add_argument(f"--{flag}", type=kind, metavar="N", help=text + shown)
    parser.add_argument(
        "--metric",
        choices=("accuracy", "f1", "matthews", "pearson"),
        help="what the best epoch is chosen by (accuracy, or pearson where labels are numbers with a fraction)",
    )
    parser.add_argument("--policy", choices=POLICIES, help=f"who takes over ({FaultsConfig.policy})")
    parser.add_argument("--scenario", choices=_SCENARIOS, help=f"what fails ({FaultsConfig.scenario})")
    return parser


def run(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Read what is named, and fine-tune."""
    given = dict(vars(options))
    workdir, task_name, step, out, json_file = (given.pop(name) for name in ("run", "task", "step", "out", "json"))
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: its folder does not exist")
    shorthands = {f"faults.{name}": given.pop(name) for name in ("policy", "scenario") if name in given}
    settings = Settings(**given)
    devices.prepare(MeshConfig(num_nodes=1))
    model = open_trained(workdir, step)
    config = with_failures(model.config, settings, shorthands, words)
    task = open_task(task_name)
    return fine_tune(
        model,
        task,
        settings,
        workdir / "finetune" / task.name.replace("/", "_") if out is None else out,
        faults=config.faults,
        degraded=config.degraded,
        basis=config.basis,
    )


def with_failures(pretrained: Config, settings: Settings, shorthands: dict[str, str], words: Sequence[str]) -> Config:
    """The config of a run with other failures, and maybe other approximations of them.

    Args:
        pretrained: of the run.
        settings: how many nodes there are.
        shorthands: settings that have flags of their own, by dotted name.
        words: other settings, as ``train.py`` takes them.

    Raises:
        ConfigError: a setting is wrong, of another section, without effect, or given twice.
    """
    scanned = scan(words)
    others = [key for key in scanned.settings if key.partition(".")[0] not in _SECTIONS]
    if scanned.name is not None or scanned.workdir is not None or scanned.print_config or scanned.show_help or others:
        raise ConfigError(
            f"got {' '.join(words)}; besides the flags of --help there are settings of faults.*, degraded.* and basis.*"
        )
    for key in shorthands.keys() & scanned.settings.keys():
        raise ConfigError(f"{key}: given twice; leave out --{key} or --{key.partition('.')[2]}")
    plain = to_dict(pretrained)
    chosen = {name: plain[name] for name in ("model", "degraded", "basis")}
    chosen |= {"faults": {}, "mesh": {"num_nodes": settings.nodes}}
    config = from_dict(dict(flatten(chosen)) | scanned.settings | shorthands)
    for key in scanned.settings:
        if message := without_effect(config, key):
            raise ConfigError(message)
    return config


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
