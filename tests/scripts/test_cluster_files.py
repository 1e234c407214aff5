"""The files for clusters: the restart loop and the SLURM script with stand-ins for what they start, the JobSet as data.

Neither SLURM nor Kubernetes is here: what is tested is what these files themselves say and do.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from mecefo_jax import cli, errors
from mecefo_jax.config_file import fields

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
FILES = ("keep_running.sh", "slurm.sh", "jobset.yaml")
DEADLINE = 60.0

CANNOT_GO_ON = {
    error.exit_code
    for error in (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.TooFewLiveNodesError,
        errors.NonFiniteError,
    )
}
DEATHS = {errors.StalledError.exit_code, errors.RestartInPlaceError.exit_code}

# Notes its arguments in $LIVES/PROCESS, a line a life, then ends as $PLAN says for that life: an exit code, or "serve"
# (until SIGTERM: then with 75) or "coordinate" (SIGTERM is ignored, as it is by the coordinator).
STAND_IN = """\
import os, pathlib, select, signal, sys
lives = pathlib.Path(os.environ["LIVES"], os.environ.get("PROCESS_ID") or "-")
plans = dict(item.split(":") for item in os.environ["PLAN"].split())
plan = plans.get(lives.name, plans.get("*", "0")).split(",")
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
if "coordinate" in plan:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if select.select([sys.stdin], [], [], 0)[0]:
    sys.exit("the input has ended")
with lives.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
step = plan[min(len(lives.read_text().splitlines()), len(plan)) - 1]
while not step.isdecimal():
    signal.pause()
os._exit(int(step))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the scripts, the stand-in, and SLURM's commands, of which srun runs the tasks right here."""
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    (tmp_path / "lives").mkdir()
    programs = {
        "python": f"#!/bin/sh\nexec {sys.executable} -c '{STAND_IN}' \"$@\"\n",
        "srun": """#!/usr/bin/env bash
            while [[ $1 != bash ]]; do shift; done
            for ((task = 0; task < SLURM_NTASKS; task++)); do
                SLURM_PROCID=$task "$@" & echo $! >>tasks
            done
            wait""",
        "scancel": '#!/usr/bin/env bash\n[[ "$*" == "--signal=TERM 4711" ]] && kill -TERM $(cat tasks)',
        "scontrol": '#!/usr/bin/env bash\necho "$*" >>scontrol',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def start(place):
    """Starts a command in that folder, in a session of its own, which ends with the test."""
    started = []

    def start(*command, plan, **environment):
        settings = {"FIRST_WAIT_SECONDS": "0", "LOOK_SECONDS": "0.1", "LIVES": str(place / "lives"), "PLAN": plan}
        process = subprocess.Popen(
            command,
            cwd=place,
            env=os.environ | settings | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"} | environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(DEADLINE)


def lives_of(place, process="-"):
    """The arguments of each life of a process."""
    path = place / "lives" / str(process)
    return path.read_text().splitlines() if path.exists() else []


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def loop(start, plan, *arguments, **environment):
    return start("bash", "scripts/keep_running.sh", "python", *arguments, plan=plan, **environment)


# Syntax and settings


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".sh")])
def test_shell_scripts_parse_and_shellcheck_finds_nothing(name):
    subprocess.run(["bash", "-n", SCRIPTS / name], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", SCRIPTS / name], check=True)


@pytest.mark.parametrize("name", FILES)
def test_every_setting_that_is_named_exists(name):
    named = set(re.findall(r"--([a-z]+\.[a-z_]+)", (SCRIPTS / name).read_text()))
    assert named <= fields().keys()
    assert bool(named) == (name != "keep_running.sh")


# The restart loop


def test_loop_restarts_what_dies_with_the_same_arguments_until_it_succeeds(place, start):
    assert loop(start, "*:1,134,0", "train.py", "two words").wait(DEADLINE) == 0
    assert lives_of(place) == ["train.py two words"] * 3


@pytest.mark.parametrize("code", sorted({error.exit_code for error in errors.RunError.__subclasses__()}))
def test_loop_ends_at_once_with_the_exit_codes_of_runs_that_end(place, start, code):
    assert loop(start, f"*:{code},0").wait(DEADLINE) == (0 if code in DEATHS else code)
    assert len(lives_of(place)) == (2 if code in DEATHS else 1)


def test_loop_gives_up_what_never_lives_long(place, start):
    assert loop(start, "*:1,1,9,0", MAX_RESTARTS="2").wait(DEADLINE) == 9
    assert len(lives_of(place)) == 3


def test_loop_does_not_count_restarts_of_what_lives_long(place, start):
    assert loop(start, "*:1,1,9,0", MAX_RESTARTS="1", QUICK_SECONDS="0").wait(DEADLINE) == 0


def test_loop_passes_sigterm_on_and_restarts_nothing_after_it(place, start):
    process = loop(start, "*:serve,0")
    wait_until(lambda: lives_of(place))
    process.terminate()
    assert process.wait(DEADLINE) == errors.PreemptedError.exit_code
    assert len(lives_of(place)) == 1


def test_loop_of_the_coordinator_kills_it_when_a_node_asks_for_all_to_restart(place, start):
    shared = {"SIGNS": str(place), "PLAN": "0:coordinate,0 1:76,0"}
    coordinator = loop(start, "", PROCESS_ID="0", **shared)
    wait_until(lambda: lives_of(place, 0))
    assert loop(start, "", PROCESS_ID="1", **shared).wait(DEADLINE) == 0
    assert coordinator.wait(DEADLINE) == 0
    assert [len(lives_of(place, process)) for process in (0, 1)] == [2, 2]
    assert [(place / f"ended-{process}").read_text() for process in (0, 1)] == ["0\n", "0\n"]


# SLURM


def job(start, plan, *words):
    variables = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "1"}
    return start("bash", "scripts/slurm.sh", "quickstart", *words, plan=plan, **variables)


def test_job_gives_each_task_its_number_which_a_restart_keeps(place, start):
    words = ["--mesh.num_nodes", "2", "--train.microbatches_per_node=8"]
    assert job(start, "0:0 1:0 2:134,0 3:0", *words).wait(DEADLINE) == 0
    assert [len(lives_of(place, process)) for process in range(4)] == [1, 1, 2, 1]
    for process in range(4):
        for line in lives_of(place, process):
            program, *words = line.split()
            config, _ = cli.parse(words)
            assert program == "train.py"
            assert (config.cluster.process_id, config.cluster.num_processes) == (process, 4)
            assert (config.cluster.coordinator, config.mesh.num_nodes) == ("auto", 2)
    assert not (place / "scontrol").exists()


def test_job_ends_when_a_node_cannot_go_on_even_if_others_could(place, start):
    assert job(start, "0:coordinate 1:serve 2:3 3:serve").wait(DEADLINE) == errors.DataError.exit_code


def test_job_goes_on_without_a_node_that_was_given_up(place, start):
    process = job(start, "0:coordinate 1:9 2:serve 3:serve")
    sign = place / "runs" / "slurm-4711" / "ended-1"
    wait_until(lambda: sign.exists() and sign.read_text() == "9\n" and lives_of(place, 2) and lives_of(place, 3))
    assert process.poll() is None
    process.terminate()
    assert process.wait(DEADLINE) == errors.PreemptedError.exit_code


def test_job_that_is_stopped_lets_all_nodes_save_and_is_requeued(place, start):
    process = job(start, "0:coordinate *:serve")
    wait_until(lambda: all(lives_of(place, number) for number in range(4)))
    process.terminate()
    assert process.wait(DEADLINE) == errors.PreemptedError.exit_code
    assert (place / "scontrol").read_text() == "requeue 4711\n"
    assert all(len(lives_of(place, number)) == 1 for number in range(4))


# Kubernetes


@pytest.fixture(scope="module")
def manifests():
    """The objects of the file by their kind."""
    return {item["kind"]: item for item in yaml.safe_load_all((SCRIPTS / "jobset.yaml").read_text())}


def jobs_of(manifests):
    return {job["name"]: job["template"]["spec"] for job in manifests["JobSet"]["spec"]["replicatedJobs"]}


def container_of(job):
    (container,) = job["template"]["spec"]["containers"]
    return container, {item["name"]: item["value"] for item in container["env"]}


def test_names_in_the_jobset_are_those_of_what_they_refer_to(manifests):
    spec, name = manifests["JobSet"]["spec"], manifests["JobSet"]["metadata"]["name"]
    jobs = jobs_of(manifests)
    assert list(jobs) == ["coordinator", "nodes"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["coordinator"]
    label = {"jobset.sigs.k8s.io/jobset-name": name}
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == label
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]
    for job in jobs.values():
        volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
        container, _ = container_of(job)
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
        assert claim == manifests["PersistentVolumeClaim"]["metadata"]["name"]
    assert manifests["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    memory = jobs["nodes"]["template"]["spec"]["volumes"][1]
    container, _ = container_of(jobs["nodes"])
    assert memory["emptyDir"]["medium"] == "Memory"
    assert {"name": memory["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_jobset_fails_exactly_where_a_run_cannot_go_on(manifests):
    for job in jobs_of(manifests).values():
        lost, stopped, failed = job["podFailurePolicy"]["rules"]
        assert (lost["action"], stopped["action"], failed["action"]) == ("Ignore", "Ignore", "FailJob")
        assert stopped["onExitCodes"]["values"] == [errors.PreemptedError.exit_code]
        assert set(failed["onExitCodes"]["values"]) == CANNOT_GO_ON
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
    (rule,) = manifests["JobSet"]["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_pods_are_numbered_from_the_coordinator_on_and_find_it(manifests, place, start):
    name, jobs = manifests["JobSet"]["metadata"]["name"], jobs_of(manifests)
    found = []
    for job in jobs.values():
        assert job["completionMode"] == "Indexed"
        assert job["completions"] == job["parallelism"]
        container, environment = container_of(job)
        assert int(environment["NUM_PROCESSES"]) == 1 + jobs["nodes"]["completions"]
        command = [word.replace("/runs/", f"{place}/runs/") for word in container["command"]]
        for index in range(job["completions"]):
            pod = start(*command, *container["args"], plan="*:0", JOB_COMPLETION_INDEX=str(index), **environment)
            assert pod.wait(DEADLINE) == 0
            (line,) = lives_of(place, len(found))
            config, workdir = cli.parse(line.split()[1:])
            found.append(config.cluster.process_id)
            assert config.cluster.coordinator.startswith(f"{name}-coordinator-0-0.{name}:")
            assert config.mesh.num_nodes <= jobs["nodes"]["completions"]
            assert workdir == place / "runs" / "mecefo"
    assert found == list(range(1 + jobs["nodes"]["completions"]))
