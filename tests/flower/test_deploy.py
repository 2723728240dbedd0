"""``polyfed deploy``: an app folder that Flower takes."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.paths import DOCS
from polyfed.cli.main import app
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.flower.app import DEFAULTS, PROJECT, RECIPE, SETTINGS_KEY, settings_from, settings_text, write_app
from polyfed.settings import Settings, with_changes
from polyfed.studies.compare.recipes import read
from polyfed.text import read_call

WITHOUT = "needs the flower extra: pip install 'polyfed[flower]'"
OWN_METHOD = """
import polyfed


@polyfed.register
def quiet_one():
    '''Does nothing of its own.'''
    return polyfed.Method("quiet_one")
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, " ".join(result.output.split())


def config_of(folder: Path) -> dict[str, object]:
    with (folder / PROJECT).open("rb") as file:
        document = tomllib.load(file)
    config = document["tool"]["flwr"]["app"]["config"]
    assert isinstance(config, dict)
    return config


def test_the_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = with_changes(
        Settings(), {"method": "fedbn + agc(clip=1.28)", "unseen": ("street", "a \"b\" 'c'"), "lr": 0.1, "clients_per_round": 2}
    )
    write_app(tmp_path / "app", settings, "mine")
    assert settings_from(config_of(tmp_path / "app")) == settings
    written = read(str(tmp_path / "app" / RECIPE)).values
    assert with_changes(Settings(), written) == settings


def test_a_budget_in_epochs_survives_as_a_recipe(tmp_path: Path) -> None:
    settings = with_changes(Settings(), {"total_epochs": 7.0})
    write_app(tmp_path / "app", settings, "mine")
    assert with_changes(Settings(), read(str(tmp_path / "app" / RECIPE)).values) == settings


def test_files_of_ones_own_methods_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quiet.py").write_text(OWN_METHOD)
    settings = with_changes(Settings(), {"load": (str(tmp_path / "quiet.py"),)})
    write_app(tmp_path / "app", settings, "mine")
    assert (tmp_path / "app" / "quiet.py").read_text() == OWN_METHOD
    config = config_of(tmp_path / "app")
    with pytest.raises(SettingError, match=r"has no quiet\.py"):
        settings_from(config)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "app"), *sys.path])
    assert settings_from(config).load == (str(tmp_path / "app" / "quiet.py"),)


def test_a_file_flower_would_leave_out_is_refused(tmp_path: Path) -> None:
    for name, sentence in (("test_quiet.py", "does not send"), ("quiet.txt", "does not send")):
        (tmp_path / name).write_text(OWN_METHOD)
        with pytest.raises(SettingError, match=sentence):
            write_app(tmp_path / "app", with_changes(Settings(), {"load": (str(tmp_path / name),)}), "mine")
        assert not (tmp_path / "app").exists()


# Inside flwr 1.41, which calls pathspec by an old name.
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_takes_the_folder_and_packs_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import validate_config

    code, said = run("deploy", "init", str(tmp_path / "app"), "--recipe", "demo", "--set", "rounds=3", "--set", "batch-size=8")
    assert code == 0 and "see docs/own-superlink.md" in said
    with (tmp_path / "app" / PROJECT).open("rb") as file:
        document = tomllib.load(file)
    assert document["project"]["dependencies"] == []
    usable, errors, warnings = validate_config(document, check_module=False)
    assert (usable, errors, warnings) == (True, [], [])
    packed = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app"))).namelist()
    assert {PROJECT, RECIPE} <= set(packed)
    config = document["tool"]["flwr"]["app"]["config"]
    assert set(DEFAULTS) < set(config), "flwr run --run-config changes only keys that are there"
    settings = settings_from(config)
    assert (settings.method, settings.rounds, settings.batch_size) == ("fedbn", 3, 8)
    code, said = run("deploy", "init", str(tmp_path / "app"), "--recipe", "demo")
    assert code == 2 and "nothing is overwritten" in said


def test_a_recipe_that_cannot_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for words, sentence in (
        (["--recipe", "demoo"], "Did you mean demo?"),
        (["--recipe", "demo", "--set", "method=fedbm"], "There is no method called 'fedbm'. Did you mean fedbn?"),
        (["--recipe", "demo", "--set", "round=3"], "Unknown setting 'round'. Did you mean rounds?"),
    ):
        pytest.importorskip("flwr", reason=WITHOUT)
        code, said = run("deploy", "init", str(tmp_path / "app"), *words)
        assert code == 2 and sentence in said and not (tmp_path / "app").exists()


def test_a_run_without_settings_says_how_to_make_the_folder() -> None:
    with pytest.raises(SettingError, match=r"no polyfed-settings. Create the app folder with: polyfed deploy init"):
        settings_from({})
    with pytest.raises(SettingError, match="is not JSON"):
        settings_from({SETTINGS_KEY: "{"})
    with pytest.raises(SettingError, match="Unknown setting 'colour'"):
        settings_from({SETTINGS_KEY: settings_text(Settings()).replace('"seed"', '"colour"')})


def test_without_flower_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.cli.commands.find_spec", lambda name: None)
    code, said = run("deploy", "init", str(tmp_path / "new"), "--recipe", "demo")
    assert code == 2 and said.endswith("Install it with: pip install 'polyfed[flower]'") and not (tmp_path / "new").exists()


def test_help_of_the_command_imports_nothing_heavy() -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    script = (
        "import sys; from click.testing import CliRunner; from polyfed.cli.main import app; "
        "assert CliRunner().invoke(app, ['deploy', 'init', '--help']).exit_code == 0; "
        "print([name for name in ('torch', 'flwr', 'cryptography') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_model_of_ones_own_travels_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason=WITHOUT)
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\n\ndef build(classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
    Path("my_net.py").write_text(text)
    words = ["--recipe", "demo", "--set", "load=my_net.py", "--set", "model=my_net:build"]
    code, said = run("deploy", "init", "app", *words)
    assert code == 0, said
    assert Path("app", "my_net.py").read_text() == text
    assert hashlib.sha256(text.encode()).hexdigest() in said
    assert config_of(Path("app"))[SETTINGS_KEY]


def test_telling_flwr_where_the_server_is_may_be_repeated(tmp_path: Path) -> None:
    text = (DOCS / "own-superlink.md").read_text()
    begin = text.index("mkdir -p ~/.flwr")
    block = text[begin : text.index("\nEND\n", begin) + len("\nEND\n")]
    for _ in range(2):
        subprocess.run(["bash", "-euc", block], check=True, cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    told = tomllib.loads((tmp_path / ".flwr" / "config.toml").read_text())
    assert told["superlink"]["trial"]["address"] == "127.0.0.1:8000"


def test_options_of_an_image_folder_reach_a_node_as_the_page_writes_them() -> None:
    config = pytest.importorskip("flwr.common.config", reason=WITHOUT)
    text = (DOCS / "own-superlink.md").read_text()
    (line,) = [line.strip() for line in text.splitlines() if "image_folder(" in line and "--node-config" in line]
    _, written = shlex.split(line)
    told = config.parse_config_args([written], flatten=False)
    assert told["domain"] == "sketch"
    call = read_call(told["data"])
    assert call.named["root"] == "/srv/images"
    assert set(call.named) <= set(data_sets.find("image_folder").signature.parameters)
