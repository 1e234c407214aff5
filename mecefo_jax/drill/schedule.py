"""When which process is struck: ``kill 2 @ step 30; stop 1 @ 12.5s; kill coordinator @ step 90``, or at random.

    schedule = strike {";" strike} | "random mtbf" SECONDS "s for" SECONDS "s"
    strike   = ("kill" | "stop") (PROCESS | "coordinator") "@" ("step" STEP | SECONDS "s")

Kill is SIGKILL, stop SIGSTOP. Processes are counted as the launcher does: 0 is the coordinator, nodes and spares
follow. Seconds count from the first step of the run; a step is reached once that many are committed.
"""

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Literal

from mecefo_jax.config_values import nearest
from mecefo_jax.errors import ConfigError

Kind = Literal["kill", "stop"]
COORDINATOR = 0

_SECONDS = r"\d{1,9}(?:\.\d{1,9})?"
_STRIKE = re.compile(
    r"(?P<kind>kill|stop)\s+(?P<target>\d{1,9}|coordinator)\s*@\s*"
    rf"(?:step\s+(?P<step>\d{{1,9}})|(?P<seconds>{_SECONDS})\s*s)",
    re.IGNORECASE | re.ASCII,
)
_RANDOM = re.compile(
    rf"random\s+mtbf\s+(?P<mtbf>{_SECONDS})\s*s\s+for\s+(?P<duration>{_SECONDS})\s*s", re.IGNORECASE | re.ASCII
)
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strike:
    """A process that is to be struck, at a step or a time."""

    kind: Kind
    target: int
    """Number of the process; 0 is the coordinator."""
    step: int | None = None
    """Steps committed when it is struck; None: ``seconds`` says when."""
    seconds: float | None = None
    """Time since the first step of the run."""
    spares_last: bool = False
    """Whether it is left out if nobody else lives then."""

    def __str__(self) -> str:
        target = "coordinator" if self.target == COORDINATOR else str(self.target)
        when = f"{self.seconds:g}s" if self.step is None else f"step {self.step}"
        return f"{self.kind} {target} @ {when}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomKills:
    """Random processes killed at exponentially distributed gaps, for a while."""

    mtbf_s: float
    """Mean time between two kills, whoever is killed."""
    duration_s: float
    """No kills after this time since the first step."""

    def __str__(self) -> str:
        return f"random mtbf {self.mtbf_s:g}s for {self.duration_s:g}s"

    def draw(self, num_processes: int, seed: int) -> tuple[Strike, ...]:
        """The strikes, in the order of their times; never the last living process.

        Args:
            num_processes: processes but the coordinator, which is not among the targets.
            seed: equal seeds give equal strikes.
        """
        rng, seconds, strikes = random.Random(seed), 0.0, list[Strike]()
        while (seconds := seconds + rng.expovariate(1 / self.mtbf_s)) < self.duration_s:
            target = rng.randint(1, num_processes)
            strikes.append(Strike(kind="kill", target=target, seconds=round(seconds, 3), spares_last=True))
        return tuple(strikes)


def parse_schedule(text: str, num_processes: int) -> tuple[Strike, ...] | RandomKills:
    """Read a schedule.

    Args:
        text: as in the module's docstring.
        num_processes: processes but the coordinator.

    Returns:
        The strikes in the order of the text, or how to draw them.

    Raises:
        ConfigError: a clause is not of that form, or names a process that there is not; gives the nearest valid form.
    """
    clauses = [clause.strip() for clause in re.split(r"[;\n]", text) if clause.strip()]
    if not clauses:
        raise ConfigError("--schedule: got nothing, expected such as 'kill 2 @ step 30; kill coordinator @ step 60'")
    if len(clauses) == 1 and clauses[0].lower().startswith("rand"):
        return _parse_random(clauses[0])
    return tuple(_parse_strike(clause, num_processes) for clause in clauses)


def _parse_random(clause: str) -> RandomKills:
    match = _RANDOM.fullmatch(clause)
    if match is None or not float(match["mtbf"]) or not float(match["duration"]):
        found = [number for number in _NUMBER.findall(clause) if float(number)]
        mtbf = found[0] if found else "20"
        duration = found[1] if len(found) > 1 else "300"
        raise ConfigError(f"--schedule: got '{clause}', expected 'random mtbf {mtbf}s for {duration}s'")
    return RandomKills(mtbf_s=float(match["mtbf"]), duration_s=float(match["duration"]))


def _parse_strike(clause: str, num_processes: int) -> Strike:
    match = _STRIKE.fullmatch(clause)
    if match is None:
        raise ConfigError(f"--schedule: got '{clause}', expected '{_nearest_form(clause, num_processes)}'")
    target = COORDINATOR if match["target"].lower() == "coordinator" else int(match["target"])
    step, seconds = match["step"], match["seconds"]
    if target > num_processes or match["target"] == "0":
        raise ConfigError(
            f"--schedule: got process {match['target']} in '{clause}', expected 1 to {num_processes} (nodes, then "
            "spares), or coordinator"
        )
    kind: Kind = "kill" if match["kind"].lower() == "kill" else "stop"
    if step is not None:
        if int(step) < 1:
            raise ConfigError(f"--schedule: got step {step} in '{clause}', expected at least 1")
        return Strike(kind=kind, target=target, step=int(step))
    return Strike(kind=kind, target=target, seconds=float(seconds))


def _nearest_form(clause: str, num_processes: int) -> str:
    """The valid strike that a wrong one looks most like."""
    words: Sequence[str] = re.findall(r"[a-z]+", clause.lower()) or ["kill"]
    kind = nearest(words[0], ("kill", "stop"))
    numbers = _NUMBER.findall(clause)
    names_coordinator = any(word.startswith("coord") for word in words)
    if names_coordinator:
        target = "coordinator"
    else:
        target = numbers.pop(0) if len(numbers) > 1 else "1"
        target = target if target.isdecimal() and 1 <= int(target) <= num_processes else "1"
    last = numbers[-1] if numbers else "30"
    in_steps = any(word.startswith("st") and word != "stop" for word in words[1:]) and "." not in last
    in_seconds = not in_steps and (re.search(r"\d\s*s", clause.lower()) is not None or "." in last)
    return f"{kind} {target} @ {last}s" if in_seconds else f"{kind} {target} @ step {max(int(last), 1)}"
