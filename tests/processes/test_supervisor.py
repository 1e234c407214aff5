"""A cluster of stand-in processes: deaths are told at once, restarts back off, nothing is left, lines stay whole."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from mecefo_jax.processes.beat import Beat
from mecefo_jax.processes.output import print_line
from mecefo_jax.processes.patience import Limits, Patience
from mecefo_jax.processes.supervisor import Supervisor

STAND_IN = pathlib.Path(__file__).with_name("stand_in.py")
DEADLINE = 30.0
QUICK = Limits(first_wait_seconds=0.05, finish_seconds=1, grace_seconds=1)
STOPS_BY_75 = """
import signal
def stop(signum, frame):
    note("stopped", f"{PROCESS} {signal.Signals(signum).name}")
    sys.exit(75 if signum == signal.SIGTERM else 130)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note("ready", PROCESS)
beat_for_ever()
"""


class Cluster:
    """A supervisor of stand-ins, whose lines are kept."""

    def __init__(self, folder: pathlib.Path, num_nodes: int, limits: Limits) -> None:
        self.folder, self.lines, self.addresses = folder, [], []
        self.num_nodes = num_nodes
        self.supervisor = Supervisor(self.commands, limits=limits, on_line=lambda *line: self.lines.append(line))

    def commands(self, address):
        self.addresses.append(address)
        return [
            [sys.executable, "-S", str(STAND_IN), str(self.folder), str(process), address]
            for process in range(1 + self.num_nodes)
        ]

    def happened(self, kind):
        return [event for event in self.supervisor.events if event["kind"] == kind]

    def told(self):
        """Each line that coordinators were told, and when it was read."""
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]

    def last_told(self):
        return self.told()[-1][1] if self.told() else ""

    def said(self):
        return [line for process, line in self.lines if process is None]


@pytest.fixture
def cluster(tmp_path):
    """Starts a cluster of so many nodes that run a piece of Python; ends it whatever the test does."""
    with contextlib.ExitStack() as stack:

        def start(node, *, num_nodes=2, limits=QUICK, **of_its_own):
            (tmp_path / "node.py").write_text(node)
            for name, text in of_its_own.items():
                (tmp_path / f"{name}.py").write_text(text)
            made = Cluster(tmp_path, num_nodes, limits)
            stack.callback(check_none_is_left, made)
            stack.enter_context(made.supervisor)
            made.supervisor.start()
            return made

        yield start


def check_none_is_left(cluster):
    """Every process that was ever started has ended and is reaped by the time the supervisor has closed."""
    for event in cluster.happened("started") + cluster.happened("restarted"):
        assert not exists(int(event["detail"].removeprefix("pid "))), event


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.01)


def test_lines_reach_the_callback_whole_with_their_writer_and_the_run_ends_by_0(cluster):
    cluster = cluster(
        "os.write(1, b'a\\xff ' + b'x' * 100_000 + b'\\nI0423 noise\\n[Gloo] Rank 1 is connected\\nE0423 kept\\nlast')"
    )
    assert cluster.supervisor.run() == 0
    for process in (1, 2):
        own = [line for writer, line in cluster.lines if writer == process]
        assert own == ["a\ufffd " + "x" * 100_000, "E0423 kept", "last"]
    assert cluster.supervisor.pids == {}
    kinds = [event["kind"] for event in cluster.supervisor.events]
    assert kinds == ["started"] * 3 + ["ended"] * 2 + ["finished"]
    assert cluster.said()[-1].startswith("exit code 0, ")


def test_lines_of_two_streams_and_two_processes_are_never_mixed(cluster):
    cluster = cluster(
        "import threading\n"
        "def write(descriptor):\n"
        "    for number in range(500):\n"
        "        for part in (f'{PROCESS} {descriptor} {number} ', 'y' * 999, '\\n'):\n"
        "            os.write(descriptor, part.encode())\n"
        "threads = [threading.Thread(target=write, args=(descriptor,)) for descriptor in (1, 2)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    assert cluster.supervisor.run() == 0
    for process in (1, 2):
        own = [line for writer, line in cluster.lines if writer == process]
        for descriptor in (1, 2):
            start = f"{process} {descriptor} "
            expected = [f"{start}{number} {'y' * 999}" for number in range(500)]
            assert [line for line in own if line.startswith(start)] == expected
        assert len(own) == 1000


def test_death_is_told_at_once_and_the_node_restarted(cluster):
    cluster = cluster("beat_for_ever()", num_nodes=3)
    wait_for(cluster.told, "start of the coordinator")
    before = cluster.supervisor.pids
    killed = time.time()
    assert cluster.supervisor.kill(2)
    wait_for(lambda: len(cluster.told()) == 2, "word of the death")
    heard, line = cluster.told()[1]
    assert line == "dead 2"
    assert heard - killed < 5  # milliseconds, if nothing else wants the processor
    wait_for(lambda: cluster.happened("restarted"), "restart")
    (death,), (restart,) = cluster.happened("died"), cluster.happened("restarted")
    assert death["process"] == restart["process"] == 2
    assert "SIGKILL" in death["detail"]
    after = cluster.supervisor.pids
    assert before.keys() == after.keys()
    assert [process for process in after if before[process] != after[process]] == [2]


def test_quick_deaths_back_off_until_the_node_is_given_up_and_the_others_go_on(cluster):
    limits = Limits(max_restarts=3, first_wait_seconds=0.1)
    cluster = cluster("beat_for_ever()", node_1="os._exit(1)", limits=limits)
    wait_for(lambda: cluster.happened("given_up"), "giving up")
    deaths, restarts = cluster.happened("died"), cluster.happened("restarted")
    assert [event["process"] for event in deaths + restarts] == [1] * (4 + 3)
    waits = [restart["time"] - death["time"] for death, restart in zip(deaths, restarts, strict=False)]
    assert waits[1] >= 0.1 and waits[2] >= 0.2
    assert list(cluster.supervisor.pids) == [0, 2]
    wait_for(lambda: [line for _, line in cluster.told()[1:]] == ["dead 1"] * 4, "word of the deaths")


def test_run_ends_when_all_nodes_are_given_up(cluster):
    limits = Limits(max_restarts=1)
    cluster = cluster("os._exit(124)", limits=limits)
    assert cluster.supervisor.run() == 124
    assert len(cluster.happened("given_up")) == 2 and len(cluster.happened("restarted")) == 2


def test_exit_by_signal_is_1_when_given_up(cluster):
    cluster = cluster("os.abort()", num_nodes=1, limits=Limits(max_restarts=0))
    assert cluster.supervisor.run() == 1
    assert "SIGABRT" in cluster.happened("given_up")[0]["detail"]


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6])
def test_node_that_cannot_go_on_ends_all_with_its_code(code, cluster):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); beat_for_ever()"
    cluster = cluster(stubborn, node_1=f"sys.exit({code})")
    assert cluster.supervisor.run() == code
    assert not cluster.happened("died") and not cluster.happened("restarted")


def test_failure_is_the_result_even_if_others_have_finished(cluster):
    cluster = cluster("note('first', os.getpid())", node_2="await_end(int(await_note('first'))); sys.exit(4)")
    assert cluster.supervisor.run() == 4


def test_death_after_others_have_finished_is_no_failure(cluster):
    cluster = cluster(
        "note('first', os.getpid())", node_2="await_end(int(await_note('first'))); os.abort()", limits=Limits()
    )
    assert cluster.supervisor.run() == 0
    assert len(cluster.happened("died")) == 1 and not cluster.happened("restarted")


def test_who_does_not_end_with_the_others_is_ended(cluster):
    cluster = cluster("await_note('ready')", node_2=STOPS_BY_75)
    assert cluster.supervisor.run() == 0
    wait_for((cluster.folder / "stopped").exists, "SIGTERM to the one that remained")


@pytest.mark.parametrize("how", ["killed", "asked for"])
def test_all_restart_in_place_at_a_new_address(how, cluster):
    node = "note('started', PROCESS)\n"
    if how == "asked for":
        node += "if PROCESS == 2 and (FOLDER / 'started').read_text().count('2') == 1: sys.exit(76)\n"
    cluster = cluster(node + "beat_for_ever()")
    before = cluster.supervisor.pids
    if how == "killed":
        wait_for(cluster.told, "start of the coordinator")
        assert cluster.supervisor.kill(0)
    wait_for(lambda: len(cluster.happened("started")) == 6, "second start")
    after = cluster.supervisor.pids
    assert not set(before.values()) & set(after.values())
    assert not any(exists(pid) for pid in before.values())
    first, second = cluster.addresses
    wait_for(lambda: cluster.last_told() == f"at {second}", "start of the new coordinator")
    assert len(cluster.happened("restart_in_place")) == 1
    assert [event["process"] for event in cluster.happened("died")] == ([0] if how == "killed" else [])
    # The new coordinator is told of the new deaths.
    cluster.supervisor.kill(1)
    wait_for(lambda: cluster.last_told() == "dead 1", "word of a death")


def test_coordinator_that_always_dies_is_given_up(cluster, monkeypatch):
    limits = Limits(max_restarts=2, first_wait_seconds=0.05)
    commands = Cluster.commands
    monkeypatch.setattr(Cluster, "commands", lambda self, address: [["false"], *commands(self, address)[1:]])
    cluster = cluster("beat_for_ever()", limits=limits)
    assert cluster.supervisor.run() == 1
    assert len(cluster.addresses) == 3


def test_program_that_is_not_there_counts_as_a_quick_death(cluster, monkeypatch):
    monkeypatch.setattr(Cluster, "commands", lambda self, address: [["cat"], ["/no/such/program"]])
    cluster = cluster("", num_nodes=1, limits=Limits(max_restarts=1))
    assert cluster.supervisor.run() == 127
    assert "could not be started (No such file or directory)" in cluster.said()[0]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_request_to_stop_is_forwarded_to_nodes_alone(signum, code, cluster):
    cluster = cluster(STOPS_BY_75, limits=Limits())
    wait_for(lambda: all(beat_seen(cluster, process) for process in (1, 2)), "start of the nodes")
    cluster.supervisor.stop(signum)
    assert cluster.supervisor.run() == code
    stopped = (cluster.folder / "stopped").read_text().split("\n")
    assert sorted(stopped) == ["", f"1 {signum.name}", f"2 {signum.name}"]
    assert not cluster.happened("died") and not cluster.happened("restarted")


def test_nodes_that_have_not_come_up_stop_by_the_signal_itself(cluster):
    cluster = cluster("time.sleep(60)")
    cluster.supervisor.stop(signal.SIGTERM)
    assert cluster.supervisor.run() == 75


@pytest.mark.parametrize("process", [0, 1])
def test_request_to_stop_ends_the_wait_for_a_restart(process, cluster, monkeypatch):
    """Nobody runs then that could answer."""
    commands = Cluster.commands
    monkeypatch.setattr(
        Cluster,
        "commands",
        lambda self, address: [
            ["false"] if number == process else command for number, command in enumerate(commands(self, address))
        ],
    )
    cluster = cluster("beat_for_ever()", num_nodes=1, limits=Limits(first_wait_seconds=600, longest_wait_seconds=600))
    again = "restart_in_place" if process == 0 else "died"
    wait_for(lambda: len(cluster.happened(again)) == 2, "second quick death")
    cluster.supervisor.stop(signal.SIGTERM)
    assert cluster.supervisor.run() == 75


def test_death_while_stopping_is_told_but_not_restarted(cluster):
    waits = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: note('asked', PROCESS))\nbeat_for_ever()"
    stops = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))\nbeat_for_ever()"
    cluster = cluster(waits, node_2=stops, limits=Limits())
    wait_for(lambda: all(beat_seen(cluster, process) for process in (1, 2)), "start of the nodes")
    cluster.supervisor.stop(signal.SIGTERM)
    wait_for((cluster.folder / "asked").exists, "SIGTERM")
    cluster.supervisor.kill(1)
    assert cluster.supervisor.run() == 75
    assert cluster.last_told() == "dead 1"
    assert not cluster.happened("restarted")


def test_second_interrupt_kills(cluster):
    cluster = cluster("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); beat_for_ever()", limits=Limits())
    wait_for(lambda: beat_seen(cluster, 1), "start of a node")
    cluster.supervisor.stop(signal.SIGINT)
    cluster.supervisor.stop(signal.SIGINT)
    assert cluster.supervisor.run() == 130


def test_stopped_process_is_killed_once_its_beat_is_old(cluster):
    limits = Limits(stall_seconds=2)
    cluster = cluster("beat_for_ever()", node_2="time.sleep(600)", limits=limits)  # 2 has not begun to beat
    wait_for(lambda: beat_seen(cluster, 1), "first beat")
    cluster.supervisor.kill(1, signal.SIGSTOP)
    wait_for(lambda: cluster.happened("restarted"), "restart")
    (stall,), (death,) = cluster.happened("stalled"), cluster.happened("died")
    assert stall["process"] == death["process"] == 1
    assert "SIGKILL" in death["detail"]


def test_process_that_signs_off_by_removing_its_beat_may_take_its_time(cluster):
    node = "beat()\nnote('first', PROCESS)\ntime.sleep(0.2)\nos.unlink(os.environ['MECEFO_BEAT_FILE'])\ntime.sleep(3)"
    cluster = cluster(node, num_nodes=1, limits=Limits(stall_seconds=2))
    assert cluster.supervisor.run() == 0
    assert not cluster.happened("stalled")


def test_who_has_not_come_up_is_named(cluster):
    cluster = cluster("beat_for_ever()", node_2="time.sleep(600)", limits=Limits(report_seconds=0.5))
    wait_for(lambda: "waiting for process 2 to come up" in cluster.said(), "the name")


def test_what_a_node_has_started_ends_with_it(cluster):
    node = (
        "import subprocess\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "note('helpers', helper.pid)\n"
        "beat_for_ever()"
    )
    cluster = cluster(node, num_nodes=1)
    helpers = cluster.folder / "helpers"
    wait_for(lambda: helpers.exists() and helpers.read_text().endswith("\n"), "start of a helper")
    helper = int(helpers.read_text())
    cluster.supervisor.kill(1)
    wait_for(lambda: not is_running(helper), "end of the helper")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_processes_bound_to_the_thread_that_started_them_outlive_the_caller_of_start(tmp_path):
    node = "import ctypes, signal\nctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)\nnote('bound', PROCESS)"
    (tmp_path / "node.py").write_text(f"{node}\nbeat_for_ever()")
    cluster = Cluster(tmp_path, 1, Limits())
    with cluster.supervisor:
        bound = threading.Event()

        def call():
            cluster.supervisor.start()
            bound.wait(DEADLINE)

        caller = threading.Thread(target=call)
        caller.start()
        wait_for((tmp_path / "bound").exists, "start of the node")
        bound.set()
        caller.join()
        beat = cluster.supervisor._roster.places[1].beat
        for _ in range(3):
            last = beat.modified
            wait_for(lambda last=last: beat.modified != last, "another beat")
        assert not cluster.happened("died")


def test_error_of_the_caller_leaves_no_process(tmp_path):
    (tmp_path / "node.py").write_text("beat_for_ever()")
    cluster = Cluster(tmp_path, 2, Limits())
    with pytest.raises(ZeroDivisionError), cluster.supervisor:
        cluster.supervisor.start()
        pids = cluster.supervisor.pids
        raise ZeroDivisionError
    assert len(pids) == 3
    assert not any(exists(pid) for pid in pids.values())


def test_error_in_the_supervisor_itself_is_raised_and_leaves_no_process(cluster, monkeypatch):
    cluster = cluster("beat_for_ever()")
    monkeypatch.setattr(cluster.supervisor, "_look", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster.supervisor.run()
    assert cluster.supervisor.pids == {}


def test_signal_to_one_that_has_ended_reaches_nobody(cluster):
    cluster = cluster("sys.exit(0)")
    assert cluster.supervisor.run() == 0
    assert not cluster.supervisor.kill(1)


def test_patience_doubles_up_to_a_limit_and_starts_anew_after_a_long_life():
    patience = Patience(Limits(max_restarts=8))
    assert [patience.wait_seconds(1) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, None]
    assert patience.wait_seconds(31) == 0
    assert patience.wait_seconds(29) == 1
    assert Patience(Limits(max_restarts=0)).wait_seconds(1000) is None


def test_beat_is_seen_by_its_change_whatever_the_clock_says(tmp_path):
    beat = Beat(tmp_path / "beat")
    beat.reset()
    beat.look(now=1.0)
    assert beat.seen is None
    os.utime(beat.path, (10**10, 10**10))
    for now in (2.0, 3.0):
        beat.look(now)
        assert beat.seen == 2.0
    os.utime(beat.path, (10**9, 10**9))
    beat.look(now=4.0)
    assert beat.seen == 4.0
    beat.path.unlink()
    beat.look(now=5.0)
    assert beat.seen is None and beat.has_begun
    beat.reset()
    beat.look(now=6.0)
    assert beat.seen is None and not beat.has_begun


def test_closed_output_drops_lines_and_ends_nothing():
    program = "import sys\nfrom mecefo_jax.processes.output import print_line\n"
    program += "for _ in range(3): print_line(None, 'line')\nsys.stderr.write('alive')"
    reading, writing = os.pipe()
    os.close(reading)
    root = STAND_IN.parents[2]
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, cwd=root)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"alive")


def test_printed_lines_name_their_writer(capsys):
    for process in (None, 0, 3):
        print_line(process, "text")
    assert capsys.readouterr().out == "[launch] text\n[coordinator] text\n[process 3] text\n"


def beat_seen(cluster, process):
    """Whether a node's beat was seen: its handlers are installed by then."""
    return cluster.supervisor._roster.places[process].beat.has_begun


def is_running(pid):
    """Whether a process runs; one that init has yet to reap does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
