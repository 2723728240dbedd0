"""The node decides: what node.toml does not allow is refused by name, bundles with code too, and what leaves has no paths."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.cli.build import build_fab_from_disk

from helpers.app_bundles import OTHER_BUNDLES
from helpers.policy_cases import AT_CLIENTS, CASES, PRIVATE, VALIDATION
from polyfed.core.method import as_method
from polyfed.errors import SettingError
from polyfed.flower.app import write_app
from polyfed.flower.join.bundle_check import check_bundle
from polyfed.flower.join.guarded_executor import redacted, uniform_counts, unlisted_code, without_paths
from polyfed.flower.join.policy import Policy, Refused
from polyfed.flower.wire.message import WireMessage, refusal
from polyfed.settings import Settings


def test_what_the_node_does_not_allow_is_refused_by_name() -> None:
    for policy, settings, ask, sentence in CASES:
        found = Policy(data="x", **policy).problems(
            Settings(**settings), {"min-nodes": 3}, {"what": "train", **ask}, ask.get("extras")
        )
        assert any(sentence in problem for problem in found), (sentence, found)


def test_scores_of_models_that_noise_covers_are_told_under_dp_required() -> None:
    for method in (AT_CLIENTS, PRIVATE, f"momentum + {AT_CLIENTS}", 'silobn + fedwon + dp_sgd(noise="system")'):
        asked = {"what": "evaluate", "purpose": "evaluation"}
        assert Policy(data="x", dp_required=True).problems(Settings(method=method), {"min-nodes": 3}, asked) == []


def test_what_it_allows_is_not_refused() -> None:
    policy = Policy(data="x", newcomer=True, import_paths=("my.models:net",), methods=("fedbn", "agc"))
    ask = {"what": "entries", "purpose": "newcomer", "round": 3, "facts": {"rounds": 20}}
    for what in ("evaluate", "train"):
        assert Policy(data="x").problems(Settings(), {"min-nodes": 2}, {"what": what, "purpose": "evaluation"}) == []
    asked = {"what": "evaluate", "purpose": "evaluation"}
    assert Policy(data="x").problems(Settings(selection="best_validation"), {"min-nodes": 2}, asked, VALIDATION) == []
    assert Policy(data="x").problems(Settings(method="ccst"), {"min-nodes": 2}, {"what": "ccst_collect"}) == []
    assert policy.problems(Settings(method="fedbn + agc(clip=1.0)", model="my.models:net"), {"min-nodes": 2}, ask) == []


def test_a_promise_that_does_not_cover_the_training_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = as_method(AT_CLIENTS)
    telling = dataclasses.replace(method, facts=dataclasses.replace(method.facts, withholds_loss=False))
    assert Policy(data="x", dp_required=True).problems(Settings(method=AT_CLIENTS), {"min-nodes": 3}, {"what": "train"}) == []
    monkeypatch.setattr("polyfed.flower.join.policy.as_method", lambda _: telling)
    (found,) = Policy(data="x", dp_required=True).problems(Settings(method=AT_CLIENTS), {"min-nodes": 3}, {"what": "train"})
    assert "the run sends training loss, which no noise covers" in found


def test_noise_of_this_machine_on_all_that_leaves_is_what_dp_required_asks_for() -> None:
    settings = Settings(method='fedwon + dp_sgd(epsilon=8.0, noise="system") + agc')
    assert Policy(data="x", dp_required=True).problems(settings, {"min-nodes": 3}, {"what": "train"}) == []
    assert Policy(data="x", dp_required=True, max_epsilon=3.0).problems(settings, {"min-nodes": 3}, {})


def test_the_file_is_written_with_what_every_key_means_and_read_again(tmp_path: Path) -> None:
    policy = Policy(data="/srv/images", domain="pen", methods=("fedbn", "fedavg"), max_rounds=7)
    policy.write(tmp_path / "node.toml")
    text = (tmp_path / "node.toml").read_text()
    assert Policy.read(tmp_path / "node.toml") == policy
    assert all(item.metadata["doc"] in text for item in dataclasses.fields(Policy))
    assert (tmp_path / "node.toml").stat().st_mode & 0o777 == 0o600


def test_a_file_that_would_not_do_what_it_says_is_refused(tmp_path: Path) -> None:
    for line, sentence in (
        ("newcommer = true", "Did you mean newcomer"),
        ("newcomer = 1", "must be true or false"),
        ('max_rounds = "many"', "must be an integer"),
        ("max_rounds = 0", "at least 1"),
        ("max_epsilon = 0", "must be positive"),
        ("max_delta = 1.0", "must be between 0 and 1"),
        ('max_epsilon = "8"', "must be a number"),
        ('methods = "fedbn"', "must be a list of strings"),
        ('scores = ["train"]', "scores cannot contain 'train'"),
        ('data_derived_uploads = "all"', "cannot be 'all'"),
        ("= broken", "Cannot read"),
    ):
        (tmp_path / "node.toml").write_text(f'data = "x"\n{line}\n')
        with pytest.raises(SettingError, match=sentence):
            Policy.read(tmp_path / "node.toml")


def test_no_path_and_no_file_name_leaves_in_an_error() -> None:
    for secret in (
        "/srv/images/patient-7.png",
        "patient-7.dcm",
        "C:\\data\\scan 4.png",
        "'/srv/my images/patient 9.png'",
        "~/x/y",
        "../state/a.safetensors",
    ):
        left = redacted(refusal(f"Client pen cannot read {secret}: no such file"), Policy(data="x"), False).control["problem"]
        assert not set(secret.strip("'").replace("\\", "/").split("/")) & set(left.replace("/", " ").split())
        assert "patient" not in left and "scan" not in left and left.startswith("Client pen cannot read")


def test_sentences_without_paths_stay_as_they_are() -> None:
    sentence = "Refused by pen (its node.toml): the run has 6 rounds, max_rounds is 5."
    assert without_paths(sentence) == sentence


def test_code_that_no_listed_bundle_brought_is_refused() -> None:
    assert "antigravity.py" in unlisted_code(["antigravity.py"])[0]
    assert "/etc/x.py" in unlisted_code(["/etc/x.py"])[0]
    assert unlisted_code([]) == []


def test_class_counts_are_told_evenly_where_they_may_not_be_told() -> None:
    answer = WireMessage({"ok": True, "description": {"client": "pen", "class_counts": [9, 1, 1]}})
    assert redacted(answer, Policy(data="x"), True).control["description"]["class_counts"] == [9, 1, 1]
    hidden = redacted(answer, Policy(data="x", class_counts=False), True).control["description"]["class_counts"]
    assert hidden == uniform_counts([9, 1, 1]) == [4, 4, 3]
    assert redacted(answer, Policy(data="x", dp_required=True), True).control["description"]["class_counts"] == hidden


def test_the_range_of_images_stays_where_noise_is_required() -> None:
    ranges = {"ward": {"floats": [-1012.5, 3071.0]}}
    answer = WireMessage({"ok": True, "description": {"client": "pen", "class_counts": [9], "deep_ranges": ranges}})
    for policy, left in ((Policy(data="x", class_counts=False), ranges), (Policy(data="x", dp_required=True), {})):
        assert redacted(answer, policy, True).control["description"]["deep_ranges"] == left


# Flower's own packing uses a name of pathspec that newer releases of it will take away.
flowers_packing = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
METHOD = "import polyfed\n\n\n@polyfed.register\ndef mine() -> polyfed.Method:\n    return polyfed.Method()\n"


@flowers_packing
def test_polyfeds_own_bundle_passes(tmp_path: Path) -> None:
    write_app(tmp_path / "app", Settings(), "demo")
    assert check_bundle(build_fab_from_disk(tmp_path / "app"), ()) == []


@flowers_packing
def test_a_file_of_methods_passes_only_where_it_or_its_bundle_is_listed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    write_app(tmp_path / "app", Settings(load=(str(tmp_path / "mine.py"),)), "demo")
    content = build_fab_from_disk(tmp_path / "app")
    with pytest.raises(Refused, match=r"mine\.py"):
        check_bundle(content, ())
    assert check_bundle(content, [hashlib.sha256(METHOD.encode()).hexdigest()]) == ["mine.py"]
    assert check_bundle(content, [hashlib.sha256(content).hexdigest()]) == ["mine.py"]


def test_other_bundles_are_refused() -> None:
    for bundle in OTHER_BUNDLES:
        content, sentence = OTHER_BUNDLES[bundle]
        with pytest.raises(Refused, match=sentence):
            check_bundle(content, ())
