"""The command line: parsing, help, exit codes, the run directory."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

import configs
import mecefo_jax
from mecefo_jax import cli, errors
from mecefo_jax.config_effects import CONDITIONS
from mecefo_jax.config_file import fields, save_config
from mecefo_jax.config_help import field_documentation

ROOT = pathlib.Path(__file__).parents[1]


def refusal(argv, capsys):
    """The line that a wrong command line prints."""
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture
def fake_trainer(monkeypatch):
    """Replaces training by a recorder, whose ``outcome`` is raised if set; devices stay as they are."""
    trainer = types.ModuleType("mecefo_jax.trainer")
    trainer.calls, trainer.outcome = [], None

    def run(config, workdir):
        trainer.calls.append((config, workdir))
        if trainer.outcome is not None:
            raise trainer.outcome
        return {}

    trainer.run = run
    monkeypatch.setitem(sys.modules, "mecefo_jax.trainer", trainer)
    monkeypatch.setattr(mecefo_jax, "trainer", trainer, raising=False)
    return trainer


def test_settings_change_the_named_config():
    config, workdir = cli.parse(
        ["quickstart", "--train.steps", "1e3", "--optim.learning-rate=3e-4", "--data.repeat", "true"]
    )
    base, _ = cli.parse(["quickstart"])
    assert config.train.steps == 1000
    assert config.optim.learning_rate == 3e-4
    assert config.data.repeat
    assert (config.model, config.mesh, config.faults) == (base.model, base.mesh, base.faults)
    assert workdir == pathlib.Path("runs/quickstart")


def test_several_settings_are_judged_together():
    config, _ = cli.parse(["quickstart", "--model.hidden_size", "96", "--model.num_heads", "6"])
    assert config.model.head_size == 16


@pytest.mark.parametrize("words", [["1,3"], ["1", "3"], ["1, 3"], ["1,", "3"], ["1", ",3,"]])
def test_lists_are_separated_by_commas_or_spaces(words):
    settings = ["--faults.scenario", "persistent", "--faults.persistent_nodes", *words, "--train.seed", "5"]
    config, _ = cli.parse(["quickstart", *settings])
    assert config.faults.persistent_nodes == (1, 3)
    assert config.train.seed == 5


def test_single_file_name_of_a_list_may_hold_spaces():
    config, _ = cli.parse(["quickstart", "--data.source", "files", "--data.files", "my text.txt", "b.txt"])
    assert config.data.files == ("my text.txt", "b.txt")


def test_words_of_a_list_are_split_at_commas():
    config, _ = cli.parse(["quickstart", "--data.source", "files", "--data.files", "a.txt,b.txt", "c.txt"])
    assert config.data.files == ("a.txt", "b.txt", "c.txt")


def test_home_of_nobody_is_an_ordinary_name(capsys):
    assert cli.parse(["quickstart", "--workdir", "~nosuch/x"])[1] == pathlib.Path("~nosuch/x")
    assert refusal(["~nosuch/x.json"], capsys).startswith("config file ~nosuch/x.json: cannot be read")


def test_workdir_and_name_choose_the_run_directory():
    assert cli.parse(["--workdir", "some/where", "quickstart"])[1] == pathlib.Path("some/where")
    assert cli.parse(["quickstart", "--name", "mine"])[1] == pathlib.Path("runs/mine")
    assert cli.parse(["quickstart", "--workdir", "~/x"])[1] == pathlib.Path.home() / "x"


def test_negative_numbers_are_values(capsys):
    assert refusal(["quickstart", "--optim.weight_decay", "-1e-3"], capsys).startswith("optim.weight_decay: got -0.001")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["quickstar"], "unknown run quickstar: did you mean quickstart?"),
        ([], "got no run to start; name one of quickstart"),
        (
            ["quickstart", "--optim.learning_rat", "1e-3"],
            "unknown setting optim.learning_rat: did you mean optim.learning_rate?",
        ),
        (["quickstart", "--workdr", "x"], "unknown setting workdr: did you mean workdir?"),
        (["quickstart", "--train.steps"], "train.steps: got no value, expected an integer"),
        (["quickstart", "--data.repeat", "--train.steps", "3"], "data.repeat: got no value, expected true or false"),
        (["quickstart", "--train.steps", "1", "--train.steps=2"], "train.steps: given twice"),
        (["quickstart", "--train.steps", "1.5"], "train.steps: got '1.5', expected an integer"),
        (["quickstart", "--train.steps", "null"], "train.steps: got 'null', expected an integer"),
        (["quickstart", "5"], "got '5' after the run's name quickstart"),
        (["quickstart", "-steps", "3"], "got '-steps' after the run's name quickstart"),
        (["quickstart", "--workdir="], "workdir: got ''"),
        (["quickstart", "--model.vocab_size", "32001", "--mesh.tensor", "4"], "model.vocab_size: got 32001"),
        (["missing.json"], "config file missing.json: cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(argv, line, capsys):
    assert refusal(argv, capsys).startswith(line)


def test_typo_gets_the_same_error_from_a_file_and_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "typo.json"
    path.write_text(json.dumps({"optim": {"learning_rat": 1e-3}}))
    assert refusal([str(path)], capsys) == refusal(["quickstart", "--optim.learning_rat", "1e-3"], capsys)


@pytest.mark.parametrize(
    ("setting", "value", "other"),
    [
        ("data.files", "a.txt", "--data.source to files"),
        ("faults.script", "fail 1 at 2", "--faults.scenario to script"),
        ("faults.persistent_nodes", "1", "--faults.scenario to persistent"),
    ],
)
def test_setting_that_would_be_ignored_is_refused(setting, value, other, capsys):
    line = refusal(["quickstart", f"--{setting}", value], capsys)
    assert line.startswith(f"{setting}: has no effect")
    assert line.endswith(other)


def test_tuning_without_effect_is_warned_of(capsys):
    argv = ["quickstart", "--faults.slack", "0.2", "--print-config"]
    assert cli.main([*argv, "--faults.policy", "balanced"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*argv, "--faults.policy", "drop"]) == 0
    assert capsys.readouterr().err == (
        "warning: faults.slack: has no effect with faults.policy drop; set --faults.policy to balanced\n"
    )


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [("data", "files", ["a.txt"]), ("faults", "script", "fail 1 at 2"), ("faults", "persistent_nodes", [1])],
)
def test_file_whose_setting_would_be_ignored_is_refused(section, setting, value, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({section: {setting: value}}))
    assert refusal([str(path)], capsys).startswith(f"{section}.{setting}: has no effect with {section}.")


def test_file_is_judged_together_with_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"faults": {"script": "fail 1 at 2"}}))
    assert cli.parse([str(path), "--faults.scenario", "script"])[0].faults.script == "fail 1 at 2"
    assert capsys.readouterr().err == ""
    cli.parse([str(path), "--faults.scenario", "none"])
    assert capsys.readouterr().err.startswith("warning: faults.script: has no effect with faults.scenario none")


@pytest.mark.parametrize("name", configs.names())
def test_file_that_sets_everything_is_not_warned_of(name, tmp_path, capsys):
    path = tmp_path / "config.json"
    save_config(configs.get(name), path)
    assert cli.parse([str(path)])[0] == configs.get(name)
    assert capsys.readouterr().err == ""


def test_every_condition_names_settings_and_values_that_exist():
    for key, (other, values) in CONDITIONS.items():
        assert key in fields()
        section, _, field = other.partition(".")
        for value in values:
            argv = ["quickstart", f"--{other}", str(value)]
            if value == "live":  # only together with where the processes meet
                argv += ["--cluster.coordinator", "host:1234", "--cluster.process-id", "1"]
                argv += ["--cluster.num-processes", "9"]
            try:
                config, _ = cli.parse(argv)
                assert getattr(getattr(config, section), field) == value
            except errors.ConfigError as refused:
                assert f"expected a value, as {other} is {value}" in str(refused) or "num_stages" in str(refused)


def test_every_setting_can_be_given_its_default():
    """Also those of sections in sections."""
    default = configs.get("quickstart")
    for key in fields():
        value = functools.reduce(getattr, key.split("."), default)
        if isinstance(value, int | float) and not key.startswith("cluster."):
            assert cli.parse(["quickstart", f"--{key}", str(value)])[0] == default, key


def test_printed_config_serves_as_a_config_file(tmp_path, capsys):
    assert cli.main(["quickstart", "--train.steps", "77", "--print-config"]) == 0
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out)
    assert cli.parse([str(path)])[0] == cli.parse(["quickstart", "--train.steps", "77"])[0]
    assert cli.parse([str(path), "--train.steps", "78"])[0].train.steps == 78


def test_help_lists_every_setting_with_its_default_and_meaning(capsys):
    assert cli.main(["llama_1b", "--help"]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for key, (section, field, _) in fields().items():
        assert f"\n  --{key} " in text
        assert f"{field_documentation(section)[field.name]} (default: " in flat
    assert "feed-forward network (F). (default: 5461)" in flat
    assert cli.main(["-h"]) == 0


def test_help_starts_no_jax():
    code = "import sys; from mecefo_jax.cli import main; main(['--help']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_run_hands_config_and_directory_to_the_trainer_and_returns_0(fake_trainer, tmp_path):
    assert cli.main(["quickstart", "--workdir", str(tmp_path / "run"), "--train.steps", "3"]) == 0
    ((config, workdir),) = fake_trainer.calls
    assert (config.train.steps, workdir) == (3, tmp_path / "run")


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.TooFewLiveNodesError,
        errors.NonFiniteError,
        errors.PreemptedError,
    ],
)
def test_every_way_to_end_has_its_exit_code_and_one_line(error, fake_trainer, tmp_path, capsys):
    fake_trainer.outcome = error("what, got what, what to set")
    assert cli.main(["quickstart", "--workdir", str(tmp_path)]) == error.exit_code != 0
    assert capsys.readouterr().err == "error: what, got what, what to set\n"


def test_interrupt_exits_130(fake_trainer, tmp_path, capsys):
    fake_trainer.outcome = KeyboardInterrupt()
    assert cli.main(["quickstart", "--workdir", str(tmp_path)]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_defect_keeps_its_traceback(fake_trainer, tmp_path):
    fake_trainer.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["quickstart", "--workdir", str(tmp_path)])


def test_more_nodes_than_devices_are_refused_before_anything_is_written(fake_trainer, tmp_path, capsys):
    line = refusal(["quickstart", "--mesh.num_nodes", "9", "--workdir", str(tmp_path / "run")], capsys)
    assert line == (
        "mesh: 9 sub-meshes of fsdp 1 x tensor 1 need 9 devices, got 8; "
        "set --mesh.num_submeshes 8, so that nodes share devices"
    )
    assert not (tmp_path / "run").exists()
    assert fake_trainer.calls == []


@pytest.mark.parametrize("workdir", ["x" * 300, "file/run"])
def test_run_directory_that_cannot_be_made_is_refused(workdir, fake_trainer, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = refusal(["quickstart", "--workdir", str(tmp_path / workdir)], capsys)
    assert line.startswith(f"--workdir {tmp_path / workdir}: cannot be made (")
    assert fake_trainer.calls == []


def test_run_directory_without_permission_is_refused(fake_trainer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
    line = refusal(["quickstart", "--workdir", str(tmp_path)], capsys)
    assert line.startswith(f"--workdir {tmp_path}: cannot be written")
    assert fake_trainer.calls == []


def test_help_prints_in_any_encoding():
    done = subprocess.run(
        [sys.executable, "-c", "from mecefo_jax.cli import main; import sys; main(['-h']); print('\\u2588')"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout[-2:]) == (0, "?\n"), done.stderr


@pytest.mark.parametrize(("chosen", "seen"), [({}, 6), ({"JAX_NUM_CPU_DEVICES": "7"}, 7)])
def test_cpu_shows_as_many_devices_as_the_mesh_needs(chosen, seen, tmp_path):
    code = (
        "import sys, types, jax\n"
        "trainer = types.ModuleType('mecefo_jax.trainer')\n"
        "trainer.run = lambda config, workdir: print(jax.device_count())\n"
        "sys.modules['mecefo_jax.trainer'] = trainer\n"
        "import mecefo_jax; mecefo_jax.trainer = trainer\n"
        "from mecefo_jax.cli import main\n"
        f"sys.exit(main(['quickstart', '--workdir', {str(tmp_path)!r}, '--mesh.num_nodes', '3', '--mesh.fsdp', '2']))"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"} | chosen,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(seen)), done.stderr


def test_train_script_is_the_command_line():
    done = subprocess.run([sys.executable, "train.py", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown run nothing")
