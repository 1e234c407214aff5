"""Evaluates a trained model: ``python scripts/evaluate.py perplexity RUN_DIR`` and ``... harness RUN_DIR --tasks A,B``.

The first measures perplexity on held-out text, the run's own or any other that ``--data.field VALUE`` describes; the
second runs tasks of EleutherAI's lm-evaluation-harness (``pip install -e '.[eval]'``). docs/operations.md says what the
numbers mean.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax import devices  # first, for it sets what JAX reads when it is imported

# isort: split
from mecefo_jax.cli import scan
from mecefo_jax.config import Config, MeshConfig
from mecefo_jax.config_effects import without_effect
from mecefo_jax.config_file import from_dict, to_dict
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.evaluation.perplexity import measure_perplexity
from mecefo_jax.evaluation.text_model import TextModel
from mecefo_jax.terminal import give_up_unwritable_output, integer, tolerate_encoding
from mecefo_jax.trained import TrainedModel, open_trained, read_run_config


def main(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code, with one line on standard error where it is not 0."""
    tolerate_encoding()
    arguments, rest = make_parser().parse_known_args(argv)
    try:
        if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
            raise ConfigError(f"--json {arguments.json}: its folder does not exist")
        arguments.step = None if arguments.step is None else integer(arguments.step)
        results = perplexity(arguments, rest) if arguments.what == "perplexity" else harness(arguments, rest)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The two commands and their flags."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Evaluate a trained model.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="what", required=True, metavar="perplexity | harness")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("workdir", type=pathlib.Path, metavar="RUN_DIR", help="run directory")
    shared.add_argument("--step", metavar="N", help="checkpoint (default: the newest)")
    shared.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers there")
    held_out = commands.add_parser(
        "perplexity",
        parents=[shared],
        help="on held-out text",
        usage="%(prog)s RUN_DIR [--step N] [--batches N] [--json FILE] [--data.field VALUE ...]",
        allow_abbrev=False,
    )
    held_out.add_argument("--batches", metavar="N", help="most microbatches; none: all (default: those of the run)")
    tasks = commands.add_parser(
        "harness", parents=[shared], help="on tasks of EleutherAI's lm-evaluation-harness", allow_abbrev=False
    )
    tasks.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks, groups or tags")
    tasks.add_argument("--include-path", type=pathlib.Path, metavar="DIR", help="folder with more tasks")
    tasks.add_argument("--limit", metavar="N", help="most documents of each task (default: all)")
    tasks.add_argument("--num-fewshot", metavar="N", help="examples before each question (default: the task's)")
    tasks.add_argument("--batch-size", default="8", metavar="N", help="rows computed together (default: 8)")
    tasks.add_argument(
        "--max-length", metavar="N", help="tokens seen at once (default: data.seq_len, what the model was trained on)"
    )
    tasks.add_argument(
        "--begin-with-bos", action="store_true", help="begin contexts with BOS, as documents did in training"
    )
    return parser


def perplexity(arguments: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Measure and print perplexity; returns the numbers, JSON-able."""
    config = config_for_evaluation(arguments.workdir, rest, arguments.batches)
    model = _open(arguments)
    found = measure_perplexity(model, config)
    print(f"{arguments.workdir}, step {model.step}, {found.tokens:,} tokens of held-out text, {found.seconds:.1f} s")
    print(f"perplexity      {found.perplexity:.4f}")
    print(f"nats per token  {found.nats_per_token:.4f}")
    shown = "unknown with this tokenizer" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
    print(f"bits per byte   {shown}")
    return {"run": str(arguments.workdir), "step": model.step} | dataclasses.asdict(found)


def config_for_evaluation(workdir: pathlib.Path, words: Sequence[str], batches: str | None) -> Config:
    """The config of a run, with other data.

    Args:
        workdir: the run directory.
        words: settings of the section ``data`` as ``train.py`` takes them. Where there are any, a tokenizer that was
            trained on the run's text is taken as it is, unless they name one, and not trained anew on other text.
        batches: text of ``eval.batches``; None: as the run has it.

    Raises:
        ConfigError: it is not a run directory, or a setting is wrong, of another section or without effect.
    """
    given = scan(words)
    others = [key for key in given.settings if not key.startswith("data.")]
    if given.name is not None or given.workdir is not None or given.print_config or given.show_help or others:
        raise ConfigError(f"got {' '.join(words)}; an evaluation takes settings --data.field VALUE alone")
    settings = to_dict(read_run_config(workdir))
    kept = workdir / "tokenizer" / "tokenizer.json"
    if given.settings and settings["data"]["tokenizer"] == "bpe" and kept.exists():
        settings["data"]["tokenizer"] = str(kept)
    settings["data"] |= {key.removeprefix("data."): value for key, value in given.settings.items()}
    if batches is not None:
        settings["eval"]["batches"] = batches
    config = from_dict(settings)
    for key in given.settings:
        if message := without_effect(config, key):
            raise ConfigError(message)
    return config


def harness(arguments: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Run tasks and print the harness's table; returns its results, JSON-able."""
    from mecefo_jax.evaluation.harness import results_table, run_tasks

    if rest:
        raise ConfigError(f"unknown argument {rest[0]}; harness --help lists them")
    counts = {
        name: None if (text := getattr(arguments, name)) is None else integer(text)
        for name in ("limit", "num_fewshot", "max_length")
    }
    model = _open(arguments)
    texts = TextModel(
        model,
        batch_size=integer(arguments.batch_size),
        max_length=counts["max_length"],
        begin_with_bos=arguments.begin_with_bos,
    )
    results = run_tasks(
        texts,
        arguments.tasks.split(","),
        include_path=arguments.include_path,
        limit=counts["limit"],
        num_fewshot=counts["num_fewshot"],
    )
    print(f"{arguments.workdir}, step {model.step}, at most {texts.max_length} tokens at once")
    print(results_table(results))
    kept = ("results", "groups", "n-shot", "n-samples", "versions", "lm_eval_version")
    facts = {"run": str(arguments.workdir), "step": model.step, "max_length": texts.max_length}
    return facts | {key: results[key] for key in kept if key in results}


def _open(arguments: argparse.Namespace) -> TrainedModel:
    devices.prepare(MeshConfig(num_nodes=1))
    return open_trained(arguments.workdir, arguments.step)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
