"""Coming to a running cluster: barriers of former lives are answered, and the dead are succeeded."""

import threading
import time

import pytest

from mecefo_jax.processes import arrival
from mecefo_jax.processes.agreement import Facts, Member, View
from mecefo_jax.processes.arrival import Arrival


class Service:
    """A coordination service in a few lines: keys, lives, and barriers that end once all that live are in them."""

    def __init__(self):
        self.keys, self.lives, self.barriers = {}, {}, {}
        self.changed = threading.Condition()

    def die(self, process):
        with self.changed:
            del self.lives[process]
            self.changed.notify_all()


class Runtime:
    """What ``Arrival`` asks of one."""

    num_processes = 5

    def __init__(self, service: Service, process: int, life: int):
        self.service, self.process, self.life = service, process, life
        with service.changed:
            service.lives[process] = life
            service.changed.notify_all()

    def publish(self, key, value):
        self.service.keys[key] = value

    def forget(self, key):
        self.service.keys.pop(key, None)

    def lookup(self, folder):
        return {k[len(folder) + 1 :]: v for k, v in list(self.service.keys.items()) if k.startswith(folder + "/")}

    def wait_for(self, key, seconds):
        time.sleep(0.02)
        return self.service.keys.get(key)

    def live(self, round_number, members):
        service, name = self.service, (round_number, tuple(sorted(members)))
        with service.changed:
            inside = service.barriers.setdefault(name, set())
            inside.add(self.process)
            service.changed.notify_all()
            complete = lambda: service.lives.keys() & set(members) <= inside  # noqa: E731
            service.changed.wait_for(complete)
            return {process: life for process, life in service.lives.items() if process in members}


def facts_of(process: int, members: dict, round_number: int, service: Service) -> None:
    fact = Facts(life=service.lives.get(process, 0), members=members, epoch=4)
    service.keys[f"facts/{round_number}/{process}"] = fact.to_json()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(arrival, "_QUIET_SECONDS", 0.2)


def never():
    return False


def test_the_barrier_of_a_former_life_is_answered_and_admission_waited_for():
    service = Service()
    member = Runtime(service, 1, 11)
    facts_of(1, {1: 11, 2: 12}, 7, service)  # 2 was a member, and has died
    newcomer = Runtime(service, 2, 22)
    coming = Arrival(newcomer, num_nodes=2)
    assert coming.cluster_runs
    assert member.live(7, {1: 11, 2: 12}) == {1: 11, 2: 22}  # would wait for ever without an answer
    view = View(round=9, epoch=5, members={1: Member(node=0, life=11), 2: Member(node=1, life=22)})
    service.keys["admit/2/22"] = view.to_json()
    assert coming.wait(never) == view
    assert "waiting/2" not in service.keys


@pytest.mark.parametrize("lives", [{1: 11, 2: 12}, {1: None, 2: None}], ids=["later", "in their first round"])
def test_those_that_wait_succeed_members_that_have_all_died(lives):
    service = Service()
    first, second = Runtime(service, 1, 11), Runtime(service, 2, 12)
    service.keys |= {"life/1": "11", "life/2": "12"}
    facts_of(1, lives, 7, service)
    spare = Arrival(Runtime(service, 3, 13), num_nodes=2)
    found: dict[int, View] = {}
    waiting = [threading.Thread(target=lambda: found.update({3: spare.wait(never)}), daemon=True)]
    waiting[0].start()
    time.sleep(0.5)  # the members live: nobody may take their place, however quiet they are
    assert not found
    service.die(first.process)
    service.die(second.process)
    back = Arrival(Runtime(service, 1, 21), num_nodes=2)
    waiting.append(threading.Thread(target=lambda: found.update({1: back.wait(never)}), daemon=True))
    waiting[1].start()
    for thread in waiting:
        thread.join(20)
    assert found[1] == found[3] and found[1].epoch > 4 and found[1].round > 7
    assert {process: member.life for process, member in found[1].members.items()} == {1: 21, 3: 13}


def test_who_waits_learns_that_the_run_has_ended_and_may_be_stopped():
    service = Service()
    coming = Arrival(Runtime(service, 3, 13), num_nodes=2)
    service.keys["run/ended"] = "0"
    assert coming.wait(never) is None
    assert Arrival(Runtime(service, 4, 14), num_nodes=2).wait(lambda: True) is None
