"""Names on the command line: hyphens, underscores and case do not matter, messages keep the user's spelling and say what would work."""

from __future__ import annotations

from pathlib import Path

from helpers.command_line import SHORT, Command, says
from polyfed.cli.completion import names_of
from polyfed.core.method import parse
from polyfed.data.registry import data_sets
from polyfed.errors import plain_name
from polyfed.models import models
from polyfed.papers.files import item_names
from polyfed.studies.compare.candidates import read_one
from polyfed.studies.compare.recipes import shipped_names
from polyfed.studies.report.words import KINDS


def test_spelling_does_not_matter() -> None:
    for registry, written, name in (
        (data_sets, "cifar-10", "cifar10"),
        (data_sets, "CIFAR10", "cifar10"),
        (data_sets, "office-caltech-10", "office_caltech10"),
        (data_sets, "Office_Caltech10", "office_caltech10"),
        (data_sets, "PACS", "pacs"),
        (data_sets, "Digits-Mini", "digits_mini"),
        (models, "ResNet-20", "resnet20"),
        (models, "small-cnn", "small_cnn"),
    ):
        assert registry.find(written).name == name and written in registry
    for written, method in (
        ("FedBN", "fedbn"),
        ("Fed-Avg + Group-Norm(groups=2)", "fedavg + group_norm(groups=2)"),
        ("FedBN + AGC(clip=1.28)", "fedbn + agc(clip=1.28)"),
    ):
        assert str(parse(written)) == str(parse(method)) and parse(written) == parse(method)


def test_messages_keep_the_spelling(polyfed: Command) -> None:
    for words, sentence in (
        (["run", "Ciffar-10"], "There is no data set called 'Ciffar-10'. Did you mean cifar10? A folder root/<domain>/<class>/* is also possible."),
        (["run", "digits-mini", "--method", "Fed-BNN"], "There is no method called 'Fed-BNN'. Did you mean fedbn?"),
        (["run", "digits-mini", "--model", "mynet"], "For a custom model, write module.path:function, such as my_models:net."),
        (["compare", "digits-mini", "--methods", "fedavg, fedbn"], "Cannot read 'fedavg, fedbn' as one method. Separate methods with ; such as \"fedavg; fedbn\"."),
        (["compare", "digits-mini", "--methods", "fedavg fedbn"], "Cannot read 'fedavg fedbn' as one method. Separate methods with ; such as \"fedavg; fedbn\"."),
    ):  # fmt: skip
        says(polyfed(*words), sentence)


def test_show_finds_every_kind_in_any_spelling(polyfed: Command) -> None:
    for written, kind, name in (
        ("cifar-10", "data set", "cifar10"),
        ("office-caltech-10", "data set", "office-caltech10"),
        ("PACS", "data set", "pacs"),
        ("ResNet-20", "model", "resnet20"),
        ("Domain-Even", "partition", "domain_even"),
        ("Cross-Entropy", "loss", "cross_entropy"),
        ("Demo", "recipe", "demo"),
        ("Digits_Five/30_rounds_fedbn", "recipe", "digits-five/30-rounds-fedbn"),
        ("FedWon/Table_1", "experiment", "fedwon/table-1"),
    ):
        found = polyfed("show", written, "--json").json
        assert (found["kind"], found["name"]) == (kind, name)
        assert f"{name} {kind}" in polyfed("show", written).out


def test_show_says_all_of_a_recipe_and_of_an_experiment(polyfed: Command) -> None:
    recipe, item = polyfed("show", "demo"), polyfed("show", "fedwon/table-1")
    for words in ("digits-mini", "gperxan", "lr=0.4", "polyfed run --recipe demo"):
        assert words in recipe.out, words
    claim = "FedWon has the best average of nine methods on each of the three data sets."
    for words in (claim, "office-caltech10", "Standalone, FedAvg, FedProx", "polyfed reproduce fedwon/table-1 --root DATA"):
        assert words in " ".join(item.out.split()), words
    Path("mine.toml").write_text('title = "Mine"\n[settings]\ndata = "digits-mini"\n')
    assert polyfed("show", "mine.toml", "--json").json["settings"] == {"data": "digits-mini"}
    assert "digits-mini" in polyfed("show", "mine.toml").out
    assert polyfed("show", "fedwon/table-1", "--json").json["state"] in item.out


def test_show_keeps_the_spelling_of_what_it_does_not_know(polyfed: Command) -> None:
    says(polyfed("show", "PACZ"), "Unknown name 'PACZ'. Did you mean pacs? polyfed ls lists all names.")
    says(polyfed("show", "Fed-BNN"), "Unknown name 'Fed-BNN'. Did you mean fedbn? polyfed ls lists all names.")
    says(polyfed("reproduce", "FedWon/Tabel-1"), "There is no experiment 'FedWon/Tabel-1'. Did you mean fedwon/table-1?")
    says(polyfed("run", "--recipe", "Dmeo"), "Dmeo is neither a file nor a shipped recipe. Did you mean demo?")


def test_recipes_and_experiments_are_named_like_nothing_else() -> None:
    others = {plain_name(name) for kind in KINDS for name in names_of(kind)}
    assert not others & {plain_name(name) for name in [*shipped_names(), *item_names()]}


def test_commas_inside_brackets_are_no_separators() -> None:
    assert str(read_one("fedsr(l2r=0.01, cmi=0.001)")) == str(parse("fedsr(cmi=0.001, l2r=0.01)"))
    assert read_one(" fedavg + group_norm ") == parse("fedavg + group_norm")


def test_predict_names_files_and_clients(polyfed: Command, images: Path) -> None:
    assert polyfed("run", images, "--method", "fedbn", *SHORT, "--rounds", "1", "-q", "-o", "run").code == 0
    Path("broken.png").write_bytes(b"no image")
    good = images / "day" / "disk" / "00.png"
    says(polyfed("predict", "run", good, "--client", "dya"), "Unknown client 'dya'. Clients: day, night.")
    for file, why in (
        ("missing.png", "Cannot read missing.png: No such file or directory."),
        ("broken.png", "broken.png cannot be read as an image: Pillow does not recognise the format."),
    ):
        ended = polyfed("predict", "run", file)
        assert ended.code == 2 and f"{file}" in ended.err and why in ended.err
        assert "0x" not in ended.err and "BytesIO" not in ended.err


def test_info_is_for_bug_reports(polyfed: Command) -> None:
    shown = polyfed("info")
    assert shown.code == 0
    for word in ("polyfed", "torch", "python", "system", "cores", "devices", "cache", "data"):
        assert f" {word} " in shown.out
    assert polyfed("info", "--json").json["cores"] >= 1
