"""A newcomer waits for the state as long as there is somebody to send it, and no longer."""

import threading
import time

import pytest

from mecefo_jax.processes.agreement import Decision, Member, View
from mecefo_jax.processes.node import wait_for_handover

LONGEST, ALONE = 4.0, 0.5


class Service:
    """The key-value store as a newcomer sees it; keys can be set after a while."""

    def __init__(self, keys: dict[str, str], later: tuple[float, dict[str, str]] = (0.0, {})) -> None:
        self._keys, self._changed = dict(keys), threading.Condition()
        threading.Timer(later[0], self._set, args=(later[1],)).start()

    def _set(self, keys: dict[str, str]) -> None:
        with self._changed:
            self._keys |= keys
            self._changed.notify_all()

    def wait_for(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._keys, seconds)
            return self._keys.get(key)

    def lookup(self, folder: str) -> dict[str, str]:
        with self._changed:
            return {
                key.removeprefix(f"{folder}/"): value for key, value in self._keys.items() if key.startswith(folder)
            }


def decision(others: int) -> Decision:
    """Process 1 sends to the newcomer 9; so many others hold the state as well."""
    holders = tuple(range(1, 2 + others))
    members = {process: Member(node=node) for node, process in enumerate((*holders, 9))}
    view = View(round=7, epoch=3, members=members)
    return Decision(action="step", view=view, step=5, holders=holders, newcomers=(9,))


def wait(service: Service, others: int = 2) -> tuple[str | None, float]:
    began = time.monotonic()
    return wait_for_handover(service, decision(others), LONGEST, ALONE), time.monotonic() - began


def test_what_the_source_says_is_waited_for():
    service = Service({"facts/6/1": ""}, later=(0.6, {"handover/7": "account"}))
    told, waited_s = wait(service)
    assert told == "account" and waited_s < LONGEST


def test_an_empty_word_tells_that_no_state_comes():
    assert wait(Service({"handover/7": ""}))[0] == ""


def test_a_source_that_has_ended_the_round_sends_nothing_any_more():
    told, waited_s = wait(Service({"facts/7/1": ""}))
    assert told is None and waited_s < LONGEST / 2


@pytest.mark.parametrize("ended", [("2", "3"), ("2",)])
def test_a_source_that_is_the_last_one_missing_is_given_a_moment(ended):
    told, waited_s = wait(Service({f"facts/7/{process}": "" for process in ended}))
    assert told is None
    assert (waited_s < LONGEST / 2) == (len(ended) == 2)
    assert waited_s >= (ALONE if len(ended) == 2 else LONGEST)


def test_a_source_without_others_is_waited_for_to_the_end():
    told, waited_s = wait(Service({}), others=0)
    assert told is None and waited_s >= LONGEST
