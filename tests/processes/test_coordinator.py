"""Process 0 passes on what the launcher tells of deaths, and says who has not started."""

import concurrent.futures
import io
import os
import time

import pytest

from mecefo_jax.config import ClusterConfig, Config, FaultsConfig, MeshConfig
from mecefo_jax.processes import coordinator

ADDRESS = "127.0.0.1:1234"


class Left(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def reported(monkeypatch):
    """Deaths reported to the service; the coordinator's end is an exception."""
    told: list[tuple[str, int]] = []

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(coordinator, "report_death", lambda address, process: told.append((address, process)))
    monkeypatch.setattr(os, "_exit", leave)
    return told


class Store:
    """The keys that are forgotten."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


def listen(monkeypatch, text: str, store: Store | None) -> None:
    connected = concurrent.futures.Future()
    if store is not None:
        connected.set_result(store)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(Left):
        coordinator._pass_on_deaths(ADDRESS, connected)


def test_a_death_is_told_and_the_dead_wait_for_admission_no_more(monkeypatch, reported):
    store = Store()
    listen(monkeypatch, "dead 3\nhello\ndead x\n\ndead 12\n", store)
    assert reported == [(ADDRESS, 3), (ADDRESS, 12)]
    assert store.forgotten == ["waiting/3", "waiting/12"]


def test_deaths_before_all_have_come_up_are_not_told(monkeypatch, reported):
    listen(monkeypatch, "dead 3\n", None)
    assert reported == []


def test_those_that_have_not_started_are_named(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(coordinator, "_MISSING_SECONDS", 0.2)
    config = Config(
        mesh=MeshConfig(num_nodes=2),
        faults=FaultsConfig(scenario="live"),
        cluster=ClusterConfig(coordinator=ADDRESS, process_id=0, num_processes=4),
    )
    coordinator.arrive(config, tmp_path, 2)
    elsewhere = ClusterConfig(coordinator="127.0.0.1:9", process_id=3, num_processes=4)
    coordinator.arrive(Config(faults=config.faults, mesh=config.mesh, cluster=elsewhere), tmp_path, 3)
    connected = concurrent.futures.Future()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        naming = pool.submit(coordinator._name_missing, config, tmp_path, connected)
        deadline, said = time.monotonic() + 30, ""
        while "waiting" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.05)
        connected.set_result(None)
        naming.result(30)
    assert said.splitlines()[0] == "waiting for processes 1, 3"
