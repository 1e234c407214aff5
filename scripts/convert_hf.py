"""Converts models to and from the folders of Hugging Face's LLaMA.

    python scripts/convert_hf.py export RUN_DIR OUT_DIR [--step N] [--dtype float32|bfloat16] [--max-shard-size 5GB]
    python scripts/convert_hf.py import HF_DIR RUN_DIR [--config NAME] [--section.field VALUE ...]

An export is compared with the model it came from: bit for bit, and its logits in transformers with ours, where torch
and transformers are installed. An import is a run directory to train on from: the settings are those of a named config
(quickstart) or a config file, and may be given as to train.py.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Sequence

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax.cli import parse, scan
from mecefo_jax.config import Config
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.huggingface import (
    can_compare_logits,
    largest_logit_difference,
    read_pretrained,
    require_equal_weights,
    whole_folder,
    write_model,
    write_run,
)
from mecefo_jax.huggingface.exporting import DTYPES, MAX_SHARD_BYTES
from mecefo_jax.huggingface.verification import LOGIT_TOLERANCE
from mecefo_jax.terminal import give_up_unwritable_output, tolerate_encoding
from mecefo_jax.trained import TrainedModel, open_trained

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_FREE_OF_MODEL = ("model.remat", "model.compute_dtype")
_FROM_FOLDER = ("data.tokenizer", "data.bpe_vocab_size")


def main(argv: Sequence[str]) -> int:
    """Convert, and return the exit code (docs/operations.md)."""
    tolerate_encoding()
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.direction == "export":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    jax.config.update("jax_platforms", "cpu")  # nothing is computed that would be worth the memory of an accelerator
    try:
        if arguments.direction == "export":
            _export(arguments)
        else:
            _import(arguments, rest)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Converts models to and from Hugging Face's LLaMA.", allow_abbrev=False
    )
    directions = parser.add_subparsers(dest="direction", required=True, metavar="export|import")
    export = directions.add_parser("export", help="a run directory's model as a folder for transformers")
    export.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    export.add_argument("out_dir", type=pathlib.Path, metavar="OUT_DIR", help="new, or empty")
    export.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest intact one)")
    export.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    export.add_argument(
        "--max-shard-size",
        type=_num_bytes,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="most bytes of a file of weights, such as 500MB (default: 5GB)",
    )
    export.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the result back, and compare its logits in transformers with ours (default: --check)",
    )
    into = directions.add_parser(
        "import", allow_abbrev=False, help="a folder of transformers as a run directory", usage=_IMPORT_USAGE
    )
    into.add_argument("hf_dir", type=pathlib.Path, metavar="HF_DIR")
    into.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR", help="new, or empty")
    into.add_argument("--config", default="quickstart", metavar="NAME", help="other settings (default: %(default)s)")
    return parser


_IMPORT_USAGE = "convert_hf.py import HF_DIR RUN_DIR [--config NAME] [--section.field VALUE ...]"


def _export(arguments: argparse.Namespace) -> None:
    with whole_folder(arguments.out_dir) as folder:
        trained = open_trained(arguments.run_dir, arguments.step)
        write_model(folder, trained, dtype=arguments.dtype, max_shard_bytes=arguments.max_shard_size)
        if arguments.check:
            _check(folder, trained, arguments.dtype)
    print(f"{arguments.out_dir}: the model of step {trained.step}, {arguments.dtype}")


def _check(folder: pathlib.Path, trained: TrainedModel, dtype: str) -> None:
    require_equal_weights(folder, trained, dtype)
    print("check: the weights read back are equal bit for bit")
    if not can_compare_logits():
        print("check: logits were not compared, since torch and transformers are not installed")
        return
    difference, largest = largest_logit_difference(folder, trained, dtype)
    print(f"check: logits of transformers and ours differ by {difference:.1e} at most, of {largest:.3g} at most")
    if not difference <= LOGIT_TOLERANCE * largest:
        raise RunError(
            f"the logits differ by more than {LOGIT_TOLERANCE} of the largest; nothing was written "
            "(--no-check would write it, and is no remedy)"
        )


def _import(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    base = _base(arguments.config, settings)
    pretrained = read_pretrained(arguments.hf_dir)
    if "data.seq_len" not in scan(settings).settings:
        seq_len = min(base.data.seq_len, pretrained.model.max_seq_len)
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, seq_len=seq_len))
    for note in pretrained.notes:
        print(f"note: {note}", file=sys.stderr)
    with whole_folder(arguments.run_dir) as folder:
        write_run(folder, arguments.run_dir, pretrained, base)
    run_dir = arguments.run_dir
    print(f"{run_dir}: train on with python train.py {run_dir / 'config.json'} --workdir {run_dir}")


def _base(name: str, settings: Sequence[str]) -> Config:
    """The config that the run's other settings are from, with those of the command line."""
    words = scan(settings)
    if words.name is not None or words.workdir is not None or words.print_config or words.show_help:
        raise ConfigError(f"got {' '.join(settings)!r} after the directories; expected --section.field VALUE alone")
    for key in words.settings:
        if key in _FROM_FOLDER or key.startswith("model.") and key not in _FREE_OF_MODEL:
            raise ConfigError(f"{key}: is taken from the folder; leave it out")
    return parse([name, *settings])[0]


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*) ?(KB|MB|GB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of KB, MB or GB, such as 5GB")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
