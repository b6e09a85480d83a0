"""The command line as a user meets it: help, flags, YAML, refusals, and every shipped configuration."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dflash_lightning import __version__
from dflash_lightning.cli import COMMANDS, command_parser, run
from dflash_lightning.errors import ConfigError
from dflash_lightning.training import fit as fit_module
from dflash_lightning.training.fit import fit

ROOT = Path(__file__).parents[1]
FLAGS = {
    "prepare": ["--target", "--input", "--output", "--limit"],
    "capture": ["--target", "--data", "--cache", "--limit"],
    "evaluate": [
        *("--target", "--drafter", "--prompts", "--limit", "--max-new-tokens", "--dtype", "--json", "--plot"),
        *("--temperature", "--top-k", "--top-p", "--proposals", "--seed"),
    ],
    "generate": ["--target", "--drafter", "--prompt"],
    "export": ["--checkpoint", "--format", "--output"],
}


@pytest.mark.parametrize(("name", "flags"), FLAGS.items())
def test_promised_flags_are_there_with_help(name, flags):
    text = command_parser(name).format_help()
    actions = {flag: action for action in command_parser(name)._actions for flag in action.option_strings}
    for flag in flags:
        assert flag in text
        assert actions[flag].help
    assert "--config" in text


def test_every_command_is_listed_and_an_unknown_one_names_them(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    with pytest.raises(SystemExit) as stop:
        run(["cach", "info"])
    assert stop.value.code == 2
    assert "no command 'cach info'; the commands are prepare, capture" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "fit"])
def test_help_of_each_command_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit):
        run([*name.split(), "--help"])
    assert f"usage: dflash-lightning {name}" in capsys.readouterr().out


def test_settings_come_from_yaml_and_unknown_keys_are_refused(tmp_path):
    config = tmp_path / "evaluate.yaml"
    config.write_text("target: t\ndrafter: d\nprompts: p.jsonl\nmax_new_tokens: 7\n")
    parsed = command_parser("evaluate").parse_args(["--config", str(config), "--limit", "3"])
    assert (parsed.target, parsed.max_new_tokens, parsed.limit) == ("t", 7, 3)
    config.write_text("target: t\nmax_tokens: 7\n")
    with pytest.raises(ConfigError, match="max_tokens"):
        run(["evaluate", "--config", str(config)])


@pytest.mark.slow
def test_module_and_script_print_the_version():
    script = Path(sys.executable).with_name("dflash-lightning")
    for command in ([sys.executable, "-m", "dflash_lightning"], [str(script)]):
        found = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == __version__


@pytest.mark.slow
def test_a_users_mistake_is_one_message_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "dflash_lightning", "cache", "info", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr


def shipped(kind: str) -> list[Path]:
    return sorted((ROOT / "conf" / kind).glob("*.yaml"))


def parse(*arguments: str, capsys) -> dict:
    with pytest.raises(SystemExit) as stop:
        fit([*arguments, "--print_config"])
    assert stop.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("path", shipped("."), ids=lambda path: path.stem)
def test_runnable_configurations_are_parsed(path, capsys):
    config = parse("--config", str(path), capsys=capsys)
    assert config["trainer"]["strategy"]["class_path"].endswith("DFlashDeepSpeedStrategy")
    assert config["trainer"]["use_distributed_sampler"] is False
    assert config["trainer"]["max_steps"] > 0


@pytest.mark.parametrize(
    "path",
    [p for kind in ("model", "data", "trainer") for p in shipped(kind)],
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_configuration_groups_are_parsed(path, capsys):
    needed = ["--model.target", "t", "--data.cache", "c"]
    config = parse(f"--{path.parent.name}", str(path), *needed, capsys=capsys)
    for key, value in yaml.safe_load(path.read_text()).items():
        if not isinstance(value, dict):
            assert config[path.parent.name][key] == value


def test_an_unknown_key_in_a_training_configuration_is_refused(tmp_path):
    config = yaml.safe_load((ROOT / "conf" / "quickstart.yaml").read_text())
    config["model"]["loss"]["gama"] = 3
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"model\.loss: Option 'gama' is not accepted"):
        fit(["--config", str(file), "--print_config"])


def test_a_training_stopped_by_sigterm_does_not_exit_as_if_it_had_finished(monkeypatch):
    def stopped(*_args, **_options):
        raise SIGTERMException

    monkeypatch.setattr(fit_module, "FitCLI", stopped)
    with pytest.raises(SystemExit) as stop:
        fit_module.fit([])
    assert stop.value.code == 143
