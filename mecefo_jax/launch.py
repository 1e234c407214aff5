"""Starts a run whose nodes are processes of this machine, and keeps it going while they die.

``python -m mecefo_jax.launch --nodes 4 [--spares 1] -- quickstart [train.py arguments]``. Nothing here imports JAX.
"""

import argparse
import contextlib
import io
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import mecefo_jax
from mecefo_jax import cli
from mecefo_jax.config import MAX_NODES, Config
from mecefo_jax.config_values import check_fits, check_range
from mecefo_jax.errors import ConfigError, PreemptedError, RunError
from mecefo_jax.processes.output import print_line
from mecefo_jax.processes.patience import DEFAULTS, Limits
from mecefo_jax.processes.supervisor import Supervisor
from mecefo_jax.terminal import give_up_unwritable_output, integer, number, tolerate_encoding

_DESCRIPTION = """\
Trains with nodes that are processes of this machine. A coordinator and the nodes are
started; a node that dies is covered by the others and started again. The batch stays that
of the named run, however many nodes share it.
"""

_EPILOG = """\
What follows -- is the command line of train.py: a run's name, then settings
(python train.py --help). Set here: cluster.coordinator, cluster.process_id,
cluster.num_processes, mesh.num_nodes, faults.scenario live, and train.microbatches_per_node
unless it is given.

  python -m mecefo_jax.launch --nodes 4 -- quickstart --train.steps 100
  kill -9 $(pgrep -f 'process-id 2 ')    in another terminal: node 2 dies, and comes back

The first Ctrl-C, or SIGTERM, saves and stops; the same command resumes. A second Ctrl-C
kills. Exit codes are those of train.py (docs/operations.md).
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    """Runs a cluster to its end.

    Args:
      argv: the words after the program's name.

    Returns:
      The exit code, as of ``train.py``; a user's mistake prints one line to standard error before anything starts.
    """
    tolerate_encoding()
    try:
        options, words = scan(argv)
        arguments = cli.scan(words)
        if arguments.show_help:
            return cli.main(words)
        commands = commands_of(options, words)
        # A mistake is found here, once, and not by each process; nothing is started with this address.
        node = commands("127.0.0.1:1")[1][2:]
        if arguments.print_config:
            return cli.main(node)
        cli.parse(node)
        scenario = _named(arguments).faults.scenario
        if scenario not in ("none", "live"):
            print_line(None, f"faults.scenario live instead of {scenario}: nothing is emulated, nodes really fail")
        limits = Limits(max_restarts=options.max_restarts, stall_seconds=options.stall_seconds)
        with Supervisor(commands, limits=limits) as supervisor, _signals_to(supervisor):
            exit_code = supervisor.run()
        if exit_code in (0, PreemptedError.exit_code):  # the state is on the disk
            _free_shared_memory(node)
        return exit_code
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _free_shared_memory(node: Sequence[str]) -> None:
    """Frees what processes that died for good may have left behind."""
    from mecefo_jax.processes.keys import run_key
    from mecefo_jax.processes.memory import remove_all

    _, workdir = cli.parse(node)
    remove_all(run_key(workdir))


def commands_of(options: argparse.Namespace, words: Sequence[str]) -> Callable[[str], list[list[str]]]:
    """The commands of all processes, the coordinator's first, for the address that they shall meet at."""
    processes = range(1 + options.nodes + options.spares)
    words = [*words, *_settings(options.nodes, words)]
    return lambda address: [
        [sys.executable, str(_program()), *words, *_identity(address, process, len(processes))] for process in processes
    ]


def scan(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and the words after ``--``."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options, unknown = _parser().parse_known_args(words[:cut])
    if unknown:
        raise ConfigError(f"got {unknown[0]} before --; the run's name and its settings follow it, as in -- quickstart")
    check_range("--nodes", options.nodes, at_least=1, at_most=MAX_NODES)
    check_range("--spares", options.spares, at_least=0, at_most=MAX_NODES)
    check_range("--max-restarts", options.max_restarts, at_least=0)
    check_range("--stall-seconds", options.stall_seconds, at_least=1)
    return options, words[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mecefo_jax.launch",
        usage="%(prog)s --nodes N [--spares N] [--max-restarts N] [--stall-seconds S] -- NAME [train.py arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=integer, required=True, metavar="N", help="nodes that train")
    parser.add_argument(
        "--spares",
        type=integer,
        default=0,
        metavar="N",
        help="processes that wait to take a dead node's place (default: 0)",
    )
    parser.add_argument(
        "--max-restarts",
        type=integer,
        default=DEFAULTS.max_restarts,
        metavar="N",
        help=f"restarts in a row of a process that never lives for {DEFAULTS.quick_seconds:g} s, before it is given up "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=number,
        default=DEFAULTS.stall_seconds,
        metavar="S",
        help="kill a process that shows no sign of life for so long, as one that was stopped (default: %(default)g)",
    )
    return parser


def _program() -> pathlib.Path:
    """Where train.py is: beside the package."""
    program = pathlib.Path(mecefo_jax.__file__).resolve().parents[1] / "train.py"
    if not program.is_file():
        raise ConfigError(f"{program}: not there; run the launcher from a copy of the whole repository")
    return program


def _named(arguments: cli.Arguments) -> Config:
    """The run as it is before any setting of the command line."""
    # What this warns of, the whole command line will say again.
    with contextlib.redirect_stderr(io.StringIO()):
        return cli.parse([] if arguments.name is None else [arguments.name])[0]


def _settings(num_nodes: int, words: Sequence[str]) -> list[str]:
    """The settings to add to a command line so that the nodes are processes and share the batch of the named run."""
    arguments = cli.scan(words)
    given = arguments.settings
    for key in ("cluster.coordinator", "cluster.process_id", "cluster.num_processes"):
        if key in given:
            raise ConfigError(f"{key}: got {given[key]}, but the launcher sets it; leave it out")
    named = _named(arguments)
    own = {"mesh.num_nodes": str(num_nodes), "faults.scenario": "live"}
    for key, value in own.items():
        if given.get(key, value) != value:
            raise ConfigError(f"{key}: got {given[key]}, but the launcher sets it to {value}; leave it out")
    if "train.microbatches_per_node" not in given:
        total = named.num_microbatches
        check_fits(
            "--nodes",
            num_nodes,
            lambda count: total % count == 0,
            f"a divisor of the {total} microbatches of {named.name}'s step, or --train.microbatches_per_node after --",
        )
        own["train.microbatches_per_node"] = str(total // num_nodes)
    return [word for key, value in own.items() if key not in given for word in (f"--{key}", value)]


def _identity(address: str, process: int, num_processes: int) -> list[str]:
    """The settings that tell a process which one it is."""
    return [
        *("--cluster.coordinator", address),
        *("--cluster.process-id", str(process)),
        *("--cluster.num-processes", str(num_processes)),
    ]


@contextlib.contextmanager
def _signals_to(supervisor: Supervisor) -> Iterator[None]:
    """Passes requests to stop on to a supervisor; a terminal that is closed is one, too, unless that is ignored."""
    signums = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signums.append(signal.SIGHUP)

    def stop(signum: int, frame: object) -> None:
        supervisor.stop(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    previous = {signum: signal.signal(signum, stop) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    give_up_unwritable_output()
    sys.exit(exit_code)
