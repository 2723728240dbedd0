"""Run folders opened without the training data, from another folder, or on another machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from helpers.command_line import SHORT, STOPPER, Command, says
from helpers.networks import same
from helpers.recorded_runs import sealed_again
from polyfed import open_run, run
from polyfed.backends import compiled
from polyfed.core.data_types import DataSet, Domain, Preparation
from polyfed.core.method import methods
from polyfed.errors import DataError, RunFolderError, SettingError
from polyfed.runs.folder.paths import Reopening, anchored
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume
from polyfed.settings import Settings
from polyfed.studies.report.gather import gather
from polyfed.testing import TinyNet, tiny_federation

SMALL = {"rounds": 2, "batch_size": 8}


def quiet(_: str) -> None:
    """Nothing is said."""


def changed(path: Path, old: str, new: str) -> None:
    """Change a line of run.toml, as if the run came from another machine."""
    text = (path / "run.toml").read_text()
    assert text.count(old) == 1
    (path / "run.toml").write_text(text.replace(old, new))
    sealed_again(path)


# ------------------------------------------------------------------------------------------------ without the training data
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "gperxan", "static_bn", "partialfed_adaptive", "central", "copa"])
def test_the_models_of_a_run_are_there_without_its_data(method: str, images: Path, tmp_path: Path) -> None:
    trained = run(str(images), method, out=tmp_path / "run", **SMALL)
    shutil.rmtree(images)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    found = open_run(tmp_path / "elsewhere", notify=quiet)
    assert (found.digest, found.accuracy) == (trained.digest, trained.accuracy)
    assert found.experiment.federation.classes == ("disk", "stripe")
    assert [client.domains for client in found.experiment.federation.clients] == [
        client.domains for client in trained.experiment.federation.clients
    ]
    for client in trained.experiment.server.client_ids:
        assert same(found.model_for(client), trained.model_for(client))
    if method != "copa":  # it has more than one newcomer model
        assert same(found.newcomer(), trained.newcomer())


def test_a_run_taken_elsewhere_predicts_and_scores_other_data(polyfed: Command, images: Path, tmp_path: Path) -> None:
    data = f'image_folder(root="{images}", size=16, normalise="imagenet")'
    trained = polyfed("run", data, "--method", "fedbn", *SHORT, "--unseen", "night", "--out", "r", "-q", "--json").json
    Image.new("RGB", (16, 16), (250, 120, 50)).save(tmp_path / "new.png")
    asked = [("--newcomer", "averaged"), ("--newcomer", "nearest"), ("--client", "day")]
    expected = [polyfed("predict", "r", "new.png", "--json", "-q", *words).json["predictions"] for words in asked]
    model = open_run("r").newcomer()
    (tmp_path / "other").mkdir()
    (images / "night").rename(tmp_path / "other" / "night")
    shutil.rmtree(images)
    shutil.move("r", "taken")
    assert [polyfed("predict", "taken", "new.png", "--json", "-q", *words).json["predictions"] for words in asked] == expected
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.tensor([250, 120, 50]) / 255 - mean) / std).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    assert expected[0][0]["probability"] == pytest.approx(float(model(x).detach().softmax(1).max()), abs=1e-5)
    found = polyfed("evaluate", "taken", "other", "--json", "-q").json
    assert found["accuracy"]["unseen"] == trained["accuracy"]["unseen"] and found["accuracy"]["seen"] == {}


def test_a_run_that_chose_its_round_on_validation_data_is_used_without_any(polyfed: Command, images: Path, tmp_path: Path) -> None:
    data = f'image_folder(root="{images}", size=16, validation_share=0.2)'
    chosen = ("--selection", "best_validation", "--rounds", "3", "--batch-size", "8", "--lr", "0.5")
    trained = polyfed("run", data, "--method", "fedbn", *chosen, "--out", "r", "-q", "--json").json
    expected = trained["accuracy"]["seen"]
    assert polyfed("evaluate", "r", "--json", "-q").json["accuracy"]["seen"] == expected
    Image.new("RGB", (16, 16), (250, 120, 50)).save(tmp_path / "new.png")
    asked = ("new.png", "--client", "day", "--json", "-q")
    before = polyfed("predict", "r", *asked).json["predictions"]
    model = open_run("r", notify=quiet).model_for("day")
    whole = polyfed("evaluate", "r", data, "--json", "-q").json["accuracy"]["seen"]
    assert whole == expected  # clients without validation data score other data
    number = {line["selected_round"] for line in RunFolder("r").metrics() if line["view"] == "selected_seen"}.pop()
    same_rounds = run(data, "fedbn", rounds=number, batch_size=8, lr=0.5)
    assert same(model, same_rounds.model_for("day"))
    shutil.rmtree(images)
    assert polyfed("predict", "r", *asked).json["predictions"] == before


def test_data_and_models_of_python_need_not_be_given_to_use_a_run(tmp_path: Path) -> None:
    federation = tiny_federation()
    domains = tuple(Domain(c.id, c.train, c.tests[c.id], c.validation) for c in federation.clients)
    data = DataSet("mine", federation.classes, domains, Preparation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    trained = run(data, "fedbn", TinyNet(), out=tmp_path / "run", **SMALL)
    found = open_run(tmp_path / "run", model=TinyNet(), notify=quiet)
    assert same(found.newcomer(), trained.newcomer())
    assert found.experiment.bench.preparation == data.preparation
    with pytest.raises(RunFolderError, match="model given in Python"):
        open_run(tmp_path / "run")


def test_a_question_that_needs_the_data_is_refused_not_answered_with_blanks(polyfed: Command, images: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    (tmp_path / "stop").touch()
    method = ("--method", "static_bn + stopper", "--load", "stopping.py", "--checkpoint-every", "1")
    assert polyfed("run", images, *method, *SHORT, "--rounds", "3", "--out", "r", "-q").code == 130
    Image.new("RGB", (16, 16)).save(tmp_path / "new.png")
    refused = polyfed("predict", "r", "new.png", "--allow-unfinished", "-q")
    assert refused.code == 2 and "needs their training data" in refused.err


def test_inputs_prepared_in_a_way_of_their_own_are_not_guessed(tmp_path: Path) -> None:
    class Own(Preparation):
        """Something else."""

    federation = tiny_federation()
    domains = tuple(Domain(c.id, c.train, c.tests[c.id]) for c in federation.clients)
    run(DataSet("mine", federation.classes, domains, Own()), model="polyfed.testing:TinyNet", out=tmp_path / "run", **SMALL)
    with pytest.raises(RunFolderError, match="does not describe the data"):
        open_run(tmp_path / "run")


# ------------------------------------------------------------------------------------------------------- from another folder
def test_a_run_with_relative_paths_is_used_from_another_folder(
    polyfed: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    run(str(images), out=tmp_path / "before", **SMALL)
    words = ("--method", "fedbn + stopper", "--load", "stopping.py", "--init", "before", *SHORT, "--out", "r")
    trained = polyfed("run", "pictures", *words, "-q", "--json").json
    Image.new("RGB", (16, 16)).save(tmp_path / "new.png")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert polyfed("evaluate", "../r", "--json", "-q").json["accuracy"] == trained["accuracy"]
    assert polyfed("resume", "../r", "--json", "-q").json["digest"] == trained["digest"]
    assert polyfed("predict", "../r", "../new.png", "-q").code == 0


def test_names_stay_names_and_paths_become_absolute(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-mini").mkdir()
    settings = Settings(data="digits-mini", root="files", init="weights.pth", load=("a.py", "/b.py"))
    found = anchored(settings)
    assert (found.data, found.root, found.init) == ("digits-mini", f"{tmp_path}/files", f"{tmp_path}/weights.pth")
    assert found.load == (f"{tmp_path}/a.py", "/b.py")
    assert anchored(Settings(data="./pictures/")).data == str(images)
    assert anchored(Settings(data="pictures"), given=["data"]).data == "pictures"
    assert anchored(Settings(data="image-folder('pictures', size=16)")).data == f'image_folder(root="{images}", size=16)'
    assert anchored(Settings(data="pacs(size=64)")).data == "pacs(size=64)"


def test_a_new_place_of_the_data_is_taken_where_it_acts(tmp_path: Path) -> None:
    def data_and_root(data: str, root: str | None = None) -> tuple[str, str | None]:
        found = Reopening(root="/new").moved(Settings(data=data, root=root))
        return found.data, found.root

    assert data_and_root("/old/pictures") == ("/new", None)
    assert data_and_root("pacs(size=64)", "/old") == ("pacs(size=64)", "/new")
    assert data_and_root('image_folder(root="/old", size=16)') == ('image_folder(root="/new", size=16)', None)
    with pytest.raises(SettingError, match="does not read files from a folder"):
        data_and_root("digits-mini(per_domain=16)")


def test_compare_finds_its_runs_of_a_folder_again(polyfed: Command, images: Path) -> None:
    words = ("compare", "pictures", "--methods", "fedavg", *SHORT, "--out", "c")
    polyfed(*words)
    assert "Reusing 1 of 1 runs from c." in polyfed(*words).err


def test_runs_on_the_same_folder_elsewhere_belong_together_in_a_report(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "machine" / "pictures")
    for name, data in (("a", images), ("b", tmp_path / "machine" / "pictures")):
        run(str(data), out=tmp_path / name, **SMALL)
    assert len(gather([tmp_path / "a", tmp_path / "b"])) == 1


# ------------------------------------------------------------------------------------------------------- on another machine
def test_data_that_moved_are_named_anew(polyfed: Command, images: Path, tmp_path: Path) -> None:
    trained = polyfed("run", images, *SHORT, "--out", "r", "-q", "--json").json
    images.rename(tmp_path / "moved")
    says(polyfed("evaluate", "r", "-q"), "Folder or table not found")
    assert polyfed("evaluate", "r", "--root", "moved", "--json", "-q").json["accuracy"] == trained["accuracy"]
    assert polyfed("resume", "r", "--root", "moved", "--json", "-q").json["digest"] == trained["digest"]
    assert resume("r", how=Reopening(root="moved")).digest == trained["digest"]


def test_an_evaluation_needs_nothing_that_only_training_needs(
    polyfed: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(bench: object) -> None:
        raise AssertionError("compiled")

    (tmp_path / "stopping.py").write_text(STOPPER)
    run(str(images), out=tmp_path / "before", **SMALL)
    words = ("--method", "fedbn + stopper", "--load", "stopping.py", "--init", "before", *SHORT, "--out", "r")
    trained = polyfed("run", images, *words, "-q", "--json").json
    changed(tmp_path / "r", 'compile = "off"', 'compile = "on"')
    changed(tmp_path / "r", 'device = "cpu"', 'device = "cuda"')
    monkeypatch.setattr(compiled, "compiled_steps", no_compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shutil.rmtree(tmp_path / "before")
    (tmp_path / "stopping.py").rename(tmp_path / "other.py")
    for command in (("evaluate", "r"), ("resume", "r")):
        says(polyfed(*command, "-q"), "stopping.py")
    del methods._records["stopper"]  # as in a new process
    assert polyfed("evaluate", "r", "--load", "other.py", "--json", "-q").json["accuracy"] == trained["accuracy"]
    says(polyfed("evaluate", "r", "--load", "other.py", "--device", "cuda"), "Use one of these, or auto")


def test_a_run_goes_on_with_another_device(polyfed: Command, images: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    (tmp_path / "stop").touch()
    words = ("run", images, "--method", "fedavg + stopper", "--load", "stopping.py", *SHORT, "-q", "--json")
    assert polyfed(*words, "--out", "r").code == 130
    (tmp_path / "stop").unlink()
    changed(tmp_path / "r", 'device = "cpu"', 'device = "cuda:7"')
    # run.toml was changed, so its code needs --trust.
    says(polyfed("resume", "r", "--trust", "-q"), "--device cuda:7")
    again = polyfed("resume", "r", "--trust", "--device", "cpu", "-q", "--json")
    assert again.json["digest"] == polyfed(*words, "--out", "w").json["digest"]


def test_pretrained_weights_are_not_fetched_to_be_replaced(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.models import from_torchvision

    def offline(name: str, url: str) -> dict[str, torch.Tensor]:
        raise AssertionError("fetched")

    monkeypatch.setattr(from_torchvision, "_download", offline)
    trained = run(
        f'image_folder(root="{images}", size=32)',
        "fedbn",
        "resnet18",
        rounds=1,
        local_steps=1,
        lr=1e-4,
        batch_size=4,
        out=tmp_path / "r",
    )
    changed(tmp_path / "r", 'model = "resnet18"', 'model = "resnet18(pretrained=True)"')
    assert same(open_run(tmp_path / "r").newcomer(), trained.newcomer())


def test_a_client_that_never_trained_keeps_the_initial_weights_of_the_run(tmp_path: Path, images: Path) -> None:
    first = run(str(images), out=tmp_path / "before", **SMALL)
    save_file(first.newcomer().state_dict(), tmp_path / "weights.safetensors")
    trained = run(
        str(images),
        "fedbn",
        init=str(tmp_path / "weights.safetensors"),
        clients_per_round=1,
        rounds=1,
        batch_size=8,
        out=tmp_path / "r",
    )
    (tmp_path / "weights.safetensors").unlink()
    found = open_run(tmp_path / "r")
    for client in ("day", "night"):
        assert same(found.model_for(client), trained.model_for(client))


# ------------------------------------------------------------------------------------------------------------ idle options
def test_options_that_could_not_act_are_refused(polyfed: Command, images: Path) -> None:
    polyfed("run", images, *SHORT, "--rounds", "1", "--out", "r", "-q")
    says(polyfed("evaluate", "r", "--part", "all"), "--part requires DATA")
    says(polyfed("evaluate", "r", images, "--split", "validation"), "Remove DATA")
    says(polyfed("evaluate", "r", images, "--root", images), "--root has no effect")


def test_a_run_over_flower_is_not_gone_on_with_here(images: Path, tmp_path: Path) -> None:
    run(str(images), out=tmp_path / "r", **SMALL)
    changed(tmp_path / "r", "given_in_python = []", 'given_in_python = ["data held by nodes"]')
    with pytest.raises(DataError, match="trained by Flower nodes"):
        resume(tmp_path / "r")
    assert RunFolder(tmp_path / "r").settings().data == str(images)


@pytest.mark.parametrize(
    "damage",
    [
        ('default_model = "', 'no_model = "'),
        ("samples = [", "samples = [10000000000, "),
        ('input_type = "uint8"', 'input_type = "text"'),
        ("class_names = [", "class_names = 3\nrest = ["),
        ('input_type = "uint8"\nmean = [', 'input_type = "uint8"\nmean = ["x", '),
    ],
)
def test_a_damaged_outline_gets_one_sentence(polyfed: Command, images: Path, tmp_path: Path, damage: tuple[str, str]) -> None:
    assert polyfed("run", images, "--out", "r", *SHORT).code == 0
    changed(tmp_path / "r", *damage)
    says(polyfed("predict", "r", next(images.rglob("*.png"))), "outline")
