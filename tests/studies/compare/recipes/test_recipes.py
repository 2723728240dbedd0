"""Check that shipped recipes are valid, that errors list all problems, and that later settings override earlier ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from helpers.command_line import Command, says
from polyfed.cli.options import resolve_settings
from polyfed.data.partitions.federate import federate
from polyfed.data.placeholders import blank_data
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.papers.files import read_item
from polyfed.papers.grid import Form, cells_of
from polyfed.runs.experiment import rounds_from_budget
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import read_candidate
from polyfed.studies.compare.recipes import SHIPPED, in_grid, layered, read, shipped_names
from polyfed.studies.compare.recipes.checks import problems_of

WRONG_FORM = """\
titel = "a title"
lr = 3

[settings]
schedule = "steps(at=3)"
rounds = "ten"
ronds = 3
optimizer = "adm"
unseen = "street"
total_epochs = 3.0
"""
WRONG_TEXTS = """\
[settings]
data = "digits-fiv"
method = "fedbm + agc(clipp=1.0) + group_norm(groups=0)"
model = "resnet2O"
partition = "dirichlet(alhpa=0.1)"
loss = "focal"
"""


def all_problems(name: str, trust: bool = False) -> list[str]:
    """Return the problems with a recipe's settings and each of its methods."""
    settings = resolve_settings(None, {}, None, name, trust=trust)
    compared = [read_candidate(text, own).settings(settings) for text, own in read(name).methods.items()]
    return [problem for one in (settings, *compared) for problem in problems_of(one)]


def said(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return all_problems(str(file), trust=True)


def test_shipped_recipes_are_sound_without_data() -> None:
    for name in shipped_names():
        recipe = read(name)
        assert all_problems(name) == [], name
        assert recipe.title and "root" not in recipe.values
        assert recipe.command.startswith(f"polyfed run --recipe {name}"), name


def test_shipped_recipes_hold_no_machine_path() -> None:
    assert {"demo", "digits-five/30-rounds-fedbn", "pacs/30-rounds-photo-fedavg"} <= set(shipped_names())
    for file in SHIPPED.rglob("*.toml"):
        assert str(Path.home()) not in file.read_text() and "/work" not in file.read_text()


def test_all_errors_of_form_at_once_with_lines_and_nearest_names(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(WRONG_FORM)
    with pytest.raises(SettingError) as refused:
        read(str(tmp_path / "wrong.toml"))
    _, *found = re.split(r"line (\d+): ", str(refused.value))
    wanted = {
        1: ["titel", "title"],
        2: ["lr", "[settings]"],
        5: ["steps(at=3)"],
        6: ["rounds must be an integer", "'ten'"],
        7: ["ronds", "rounds"],
        8: ["adm", "adam"],
        9: ["unseen", "list of names"],
        10: ["rounds", "total_epochs"],
    }
    sentences = dict(zip(map(int, found[::2]), found[1::2], strict=True))
    assert sorted(sentences) == sorted(wanted) and len(found) == 2 * len(wanted)
    for line, words in wanted.items():
        assert all(word in sentences[line] for word in words), sentences[line]


def test_all_errors_of_texts_at_once_with_nearest_names(tmp_path: Path) -> None:
    found = said(tmp_path, WRONG_TEXTS)
    wanted = [("digits_fiv", "digits-five"), ("fedbm", "fedbn"), ("clipp", "clip"), ("groups",), ("resnet2O", "resnet20")]
    wanted += [("alhpa", "alpha"), ("focal", "weighted_focal")]
    for words in wanted:
        assert [all(word in text for word in words) for text in found].count(True) == 1, (words, found)
    assert len(found) == len(wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("data = 'pacs(size=32, normalise=\"none at all\")'", "normalisation"),
        ('method = "fedbn"', "no batch norm"),
        ('unseen = ["foto"]', "Did you mean photo?"),
        ('partition = "dirichlet(clients=3, alpha=-1.0)"', "alpha must be greater than 0"),
        ('loss = "weighted_focal(alpha=(1.0, 2.0))"', "7 classes"),
        ("clients_per_round = 5", "only 4 clients"),
        ('method = "local + fedprox"', "fedprox would be ignored"),
        ('data = "cifar10"\nmodel = "lenet"\nmethod = "fedavg + group_norm(groups=(2, 2, 2))"', "groups has 3 numbers"),
    ],
)
def test_values_and_joins_are_tried_without_data(tmp_path: Path, changes: str, words: str) -> None:
    default = {"data": 'data = "pacs(size=32)"', "model": 'model = "hfedf_cnn"'}
    lines = [line for key, line in default.items() if f"{key} =" not in changes]
    (problem,) = said(tmp_path, "\n".join(["[settings]", *lines, changes, ""]))
    assert words in problem


def test_what_is_not_toml_says_the_line(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="line 2: Invalid TOML"):
        said(tmp_path, "[settings]\nrounds = = 3\n")
    with pytest.raises(SettingError, match=r"There is no \[settings\] table"):
        said(tmp_path, 'title = "x"\n')


def test_a_users_methods_are_loaded(tmp_path: Path, polyfed: Command) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'from polyfed import Method, register\n\n@register\ndef mine() -> Method:\n    """Do nothing."""\n    return Method("mine")\n'
    )
    text = '[settings]\ndata = "pacs(size=32)"\nmodel = "hfedf_cnn"\nmethod = "mine"\n{}'
    assert "mine" in said(tmp_path, text.format(""))[0]
    assert said(tmp_path, text.format(f'load = ["{file.as_posix()}"]\n')) == []
    assert "Method file not found" in said(tmp_path, text.format('load = ["nowhere.py"]\n'))[0]


def test_later_layers_win_and_a_budget_replaces_the_other_kind() -> None:
    recipe = {"total_epochs": 128.0, "lr": 0.02}
    assert layered(recipe, {"rounds": 3}, {"lr": 0.1}) == {"rounds": 3, "lr": 0.1}
    assert layered({"rounds": 3}, {"total_epochs": 2.0}) == {"total_epochs": 2.0}
    with pytest.raises(SettingError, match="Keep one"):
        layered({}, {"rounds": 3, "total_epochs": 2.0})


def test_options_override_the_recipe_and_set_overrides_both(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[settings]\ndata = "digits-mini"\nlr = 0.1\nbatch_size = 8\nrounds = 5\nunseen = ["street"]\n')
    settings = resolve_settings(None, {"lr": 0.2, "batch_size": 16}, ["lr=0.3"], str(file))
    assert (settings.lr, settings.batch_size, settings.rounds, settings.unseen) == (0.3, 16, 5, ("street",))
    (tmp_path / "epochs.toml").write_text('[settings]\ndata = "cifar10"\nlocal_steps = 100\ntotal_epochs = 128.0\n')
    named = resolve_settings(None, {}, ["rounds=2"], str(tmp_path / "epochs.toml"))
    assert (named.rounds, named.total_epochs, named.local_steps) == (2, None, 100)


def test_fixed_epochs_become_the_papers_rounds() -> None:
    settings = next(cell.settings for cell in cells_of(read_item("fixbn/table-5"), Form()) if cell.row.name == "BN")
    assert settings is not None
    data = blank_data("cifar10", data_sets.find("cifar10"), ())
    assert rounds_from_budget(settings, federate(data, settings.partition)).rounds == 640


def test_a_grid_is_every_combination_of_its_axes() -> None:
    document = tomllib.loads("""
        names = "set/{target}-{method}"
        title = "{label} without {target}"
        note = "Short. {more}"
        settings = { data = "digits-mini", lr = 0.1 }
        grid.target = { pen = { unseen = ["pen"] }, post = { unseen = ["post"] } }
        grid.method = { plain = { label = "FedAvg", method = "fedavg" }, fast = { label = "FedBN", method = "fedbn", lr = 0.4, more = "Tuned." } }
    """)
    found = in_grid(document)
    assert list(found) == ["set/pen-plain", "set/pen-fast", "set/post-plain", "set/post-fast"]
    assert found["set/post-fast"] == {
        "title": "FedBN without post",
        "note": "Short. Tuned.",
        "settings": {"data": "digits-mini", "lr": 0.4, "unseen": ["post"], "method": "fedbn"},
    }
    assert found["set/pen-plain"]["note"] == "Short." and found["set/pen-plain"]["settings"]["lr"] == 0.1


def test_recipes_are_listed_with_their_titles(polyfed: Command) -> None:
    assert len(shipped_names()) > 70
    assert {"name": "demo", "summary": read("demo").title} in polyfed("ls", "recipes", "--json").json["items"]


def test_a_run_from_a_recipe(polyfed: Command, images: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(f'title = "mine"\n\n[settings]\ndata = "{images.as_posix()}"\nrounds = 3\nbatch_size = 4\n')
    shown = polyfed("run", "--recipe", "r.toml", "--set", "rounds=1", "--method", "fedbn", "-q", "--json", "--out", "done").json
    assert (shown["rounds"], shown["method"]) == (1, "fedbn")
    assert all_problems("done/run.toml") == []
    says(polyfed("run", "--recipe", "digits-five/30-rounds-fedbm"), "Did you mean digits-five/30-rounds-fedbn?")


def test_every_setting_can_be_written_in_a_recipe(tmp_path: Path) -> None:
    import tomli_w

    values = Settings(unseen=("street",), data="digits-mini(per_domain=30)", rounds=3).to_dict()
    (tmp_path / "all.toml").write_text(tomli_w.dumps({"settings": values}))
    assert all_problems(str(tmp_path / "all.toml")) == []
    assert resolve_settings(None, {}, None, str(tmp_path / "all.toml")) == Settings(**{**values, "unseen": ("street",), "load": ()})


def test_a_recipe_without_any_setting_is_said(tmp_path: Path) -> None:
    for content in ("", "\n", "# only a comment\n"):
        (tmp_path / "r.toml").write_text(content)
        with pytest.raises(SettingError, match=r"The file is empty\. Add a \[settings\] table"):
            read(str(tmp_path / "r.toml"))
