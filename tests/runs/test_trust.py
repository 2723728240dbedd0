"""Code named by a run folder or recipe of another account runs only if the user requests it."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import polyfed as api
from helpers.command_line import SHORT, Command, Ended, as_process, says
from helpers.recorded_runs import sealed_again
from polyfed.core.method import load_file
from polyfed.data.federation_summary import FederationSummary
from polyfed.errors import UntrustedCode
from polyfed.runs.assemble import build_federation, build_model, imported
from polyfed.runs.folder.account_key import KEY_BYTES, account_key, is_sealed, key_file, sealed
from polyfed.settings import Settings
from polyfed.trust import NOTHING, code_in

EVIL = """
from pathlib import Path
from polyfed import Method, register
from torch import nn

Path({marker!r}).write_text("ran")

@register
def {name}() -> Method:
    return Method("{name}", standalone=False)

def build(classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * input_shape[1] ** 2, classes))
"""


class Foreign:
    """A run folder and a recipe of another account, whose code leaves a mark when it runs."""

    def __init__(self, home: Path, run: Path, images: Path, setting: str) -> None:
        self.name = f"evil_{uuid.uuid4().hex[:12]}"
        self.marker, self.run, self.recipe = home / "marker", run, home / "recipe.toml"
        self.file = home / f"{self.name}.py"
        self.file.write_text(EVIL.format(marker=str(self.marker), name=self.name))
        self.named = str(self.file) if setting == "load" else f"{self.name}:build"
        self.line = f'load = ["{self.file}"]' if setting == "load" else f'model = "{self.named}"'
        self.recipe.write_text(f'[settings]\ndata = "{images}"\nrounds = 1\nbatch_size = 8\n{self.line}\n')
        document = (run / "run.toml").read_text()
        old = r"^load = \[\]" if setting == "load" else r"^\[settings\]"
        new = self.line if setting == "load" else f"[settings]\n{self.line}"
        changed, count = re.subn(old, new.replace("\\", r"\\"), document, count=1, flags=re.MULTILINE)
        assert count == 1, document
        (run / "run.toml").write_text(changed)
        sealed_again(run)

    @property
    def ran(self) -> bool:
        return self.marker.exists()


@pytest.fixture(params=["load", "model"])
def foreign(request: pytest.FixtureRequest, polyfed: Command, images: Path, tmp_path: Path) -> Foreign:
    assert polyfed("run", images, "--out", "run", "-q", *SHORT).code == 0
    for manifest in sorted((tmp_path / "run" / "checkpoint").glob("manifest-*"))[1:]:
        manifest.unlink()  # so that the run can be resumed
    return Foreign(tmp_path, tmp_path / "run", images, request.param)


def refused(ended: Ended, foreign: Foreign) -> None:
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert not foreign.ran
    words = foreign.named if foreign.named in ended.err else foreign.name
    assert words in ended.err and "--trust" in ended.err, ended.err


def commands(foreign: Foreign, images: Path) -> dict[str, tuple[str | Path, ...]]:
    image = next(images.rglob("*.png"))
    return {
        "predict": ("predict", foreign.run, image, "--allow-unfinished"),
        "evaluate": ("evaluate", foreign.run, "--allow-unfinished"),
        "evaluate other data": ("evaluate", foreign.run, images, "--allow-unfinished"),
        "resume": ("resume", foreign.run),
        "run": ("run", "--recipe", foreign.recipe, "--out", "new"),
        "run of a run.toml": ("run", "--recipe", foreign.run / "run.toml", "--out", "new"),
        "estimate": ("run", "--recipe", foreign.recipe, "--estimate"),
        "compare": ("compare", "--recipe", foreign.recipe, "--methods", "fedavg", "--out", "new"),
        "sweep": ("sweep", "--recipe", foreign.recipe, "--methods", "fedavg", "--lr", "0.1", "--out", "new"),
    }


def test_no_command_runs_code_that_only_a_foreign_file_names(foreign: Foreign, polyfed: Command, images: Path) -> None:
    for words in commands(foreign, images).values():
        refused(polyfed(*words), foreign)


@pytest.mark.slow
@pytest.mark.parametrize("foreign", ["load"], indirect=True)
def test_the_program_in_a_process_of_its_own_runs_no_such_code_unless_it_is_trusted(
    foreign: Foreign, images: Path, tmp_path: Path
) -> None:
    words = commands(foreign, images)
    for one in words.values():
        refused(as_process(tmp_path, *one), foreign)
    for one in (("inspect", foreign.run), ("digest", foreign.run), ("report", foreign.run, "-o", "page.html")):
        assert as_process(tmp_path, *one).code == 0 and not foreign.ran, one
    assert as_process(tmp_path, *words["run"], "--trust", "-q").code == 0 and foreign.ran


def test_commands_that_need_no_code_run_none(foreign: Foreign, polyfed: Command) -> None:
    for words in (("report", foreign.run, "-o", "page.html"), ("digest", foreign.run)):
        polyfed(*words)
        assert not foreign.ran, words


def test_inspect_shows_the_code_and_imports_nothing(foreign: Foreign, polyfed: Command) -> None:
    found = polyfed("inspect", foreign.run, "--json").json
    assert not foreign.ran and not found["is_own"]
    assert len(found["code"]) == 1 and foreign.name in found["code"][0]
    assert found["checkpoint"].startswith("round 0, not finished")
    assert foreign.name in polyfed("inspect", foreign.run).out.replace("\n", "")
    words = f"import sys\nfrom polyfed.runs.folder.inspection import inspect_run\ninspect_run({str(foreign.run)!r})\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)
    assert not foreign.ran


def test_inspect_says_what_is_wrong_in_a_sentence(polyfed: Command, tmp_path: Path) -> None:
    says(polyfed("inspect", "nowhere"), "nowhere")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.toml").write_text('settings = 3\nmethod = []\noutline = "x"\n')
    (tmp_path / "odd" / "checkpoint").write_text("a file")
    assert "Cannot read" in polyfed("inspect", "odd", "--json").json["problems"][0]


def test_python_runs_no_code_of_a_foreign_folder(foreign: Foreign) -> None:
    for open_folder in (functools.partial(api.open_run, allow_unfinished=True), api.resume):
        with pytest.raises(UntrustedCode, match=foreign.name):
            open_folder(foreign.run)
    assert not foreign.ran


@pytest.mark.parametrize("which", ["run", "run of a run.toml", "compare", "estimate"])
def test_a_recipe_that_is_trusted_runs_its_code(foreign: Foreign, polyfed: Command, images: Path, which: str) -> None:
    ended = polyfed(*commands(foreign, images)[which], "--trust")
    assert foreign.ran, ended.err


def test_naming_the_code_again_allows_it(foreign: Foreign, polyfed: Command) -> None:
    setting = "--load" if foreign.file.name in foreign.named else "--model"
    ended = polyfed("run", "--recipe", foreign.recipe, "--out", "new", setting, foreign.named, "-q")
    assert ended.code == 0 and foreign.ran, ended.err


def test_trust_without_a_recipe_is_refused(polyfed: Command, images: Path) -> None:
    assert "--recipe" in polyfed("run", images, "--trust", *SHORT).err


class Own:
    """A run of this account with custom method and model files."""

    def __init__(self, home: Path, polyfed: Command, images: Path) -> None:
        self.name = f"mine_{uuid.uuid4().hex[:12]}"
        self.marker, self.run = home / "marker", home / "mine"
        (home / f"{self.name}.py").write_text(EVIL.format(marker=str(self.marker), name=self.name))
        (home / f"net_{self.name}.py").write_text("from torch import nn\n" + EVIL[EVIL.index("def build") :])
        self.words = ("--load", f"{self.name}.py", "--model", f"net_{self.name}:build")
        ended = polyfed("run", images, "--method", f"fedavg + {self.name}", *self.words, "--out", "mine", "-q", *SHORT)
        assert ended.code == 0, ended.err
        self.marker.unlink()


def test_a_folder_of_this_account_needs_no_flag(polyfed: Command, images: Path, tmp_path: Path) -> None:
    own = Own(tmp_path, polyfed, images)
    image = next(images.rglob("*.png"))
    for words in (("predict", own.run, image), ("evaluate", own.run), ("resume", own.run)):
        own.marker.unlink(missing_ok=True)
        ended = polyfed(*words, "-q")
        assert ended.code == 0 and own.marker.exists(), ended.err


def test_another_account_must_trust_it_or_name_it_again(
    polyfed: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Own(tmp_path, polyfed, images)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another account"))
    image = next(images.rglob("*.png"))
    for command in (("predict", own.run, image), ("evaluate", own.run), ("resume", own.run)):
        ended = polyfed(*command)
        assert ended.code == 2 and own.name in ended.err and not own.marker.exists(), ended.err
        for words in (("--trust",), own.words):
            assert polyfed(*command, *words, "-q").code == 0
            assert own.marker.exists()
            own.marker.unlink()
    with pytest.raises(UntrustedCode):
        api.open_run(own.run)
    assert not own.marker.exists()
    api.open_run(own.run, trust=True)
    assert own.marker.exists()


def test_the_model_in_the_outline_of_a_foreign_folder_is_not_imported(polyfed: Command, images: Path, tmp_path: Path) -> None:
    polyfed("run", images, "--out", "run", "-q", *SHORT)
    document = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(
        document.replace('default_model = "small_cnn"', 'default_model = "antigravity:build"')
    )
    sealed_again(tmp_path / "run")
    ended = polyfed("predict", "run", next(images.rglob("*.png")))
    assert ended.code == 2 and "antigravity" in ended.err


def test_nothing_is_trusted_until_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(EVIL.format(marker=str(tmp_path / "marker"), name=f"gate_{uuid.uuid4().hex[:12]}"))
    for run in (lambda: load_file(file, NOTHING), lambda: imported("os:abort", Settings().trust)):
        with pytest.raises(UntrustedCode, match="was not named by you"):
            run()
    assert not (tmp_path / "marker").exists()
    trust = NOTHING.adding(code_in([str(file)]))
    load_file(file, trust)
    trust.require(code_in([str(file)]))
    assert not NOTHING.code, "trusting code changes no other value"


def test_trust_travels_with_settings_and_is_in_no_file() -> None:
    named = Settings(model="mine:build", load=("mine.py",)).trusted()
    assert named.trust.code and named == Settings.from_dict(named.to_dict())
    assert not Settings.from_dict(named.to_dict()).trust.code and "trust" not in named.to_dict()
    assert dataclasses.replace(named, seed=3).trust == named.trust


def test_a_node_cannot_make_the_server_import_its_default_model() -> None:
    outline = FederationSummary.of(build_federation("digits-mini", Settings())).outline() | {"default_model": "os:abort"}
    with pytest.raises(UntrustedCode, match="os"):
        build_model(None, FederationSummary.from_outline(outline, "data").federation(), 0, NOTHING)


def test_the_key_is_made_once_and_for_this_account_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert account_key() is None
    text = sealed("a = 1\n")
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600 and len(key_file().read_bytes()) == KEY_BYTES
    assert is_sealed(text.encode()) and sealed("a = 1\n") == text
    assert not is_sealed(text.replace("1", "2", 1).encode())
    assert not is_sealed(text.encode() + b"b = 2\n")
    assert not is_sealed(b"a = 1\n")
    key_file().chmod(0o644)
    assert account_key() is None and not is_sealed(text.encode())
    shutil.rmtree(tmp_path / "config")
    assert not is_sealed(text.encode())


def test_without_a_place_for_the_key_runs_are_written_unsealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("a file")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert sealed("a = 1\n") == "a = 1\n"


def test_the_doctor_accepts_a_model_that_the_user_names(polyfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures with changed settings, which must keep the code that the user named."""
    (tmp_path / "mine_for_the_doctor.py").write_text(
        "from torch import nn\n\ndef net(classes):\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ended = polyfed("doctor", "digits-mini(per_domain=20)", "--model", "mine_for_the_doctor:net", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["findings"]
