"""The node decides: what node.toml does not allow is refused by name, and what leaves has no paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.core.method import as_method
from polyfed.deploy.guarded_app import evenly, unlisted_code, what_may_leave, without_paths
from polyfed.deploy.policy import Policy
from polyfed.errors import SettingError
from polyfed.flower.wire_message import WireMessage, refusal
from polyfed.settings import Settings

AT_CLIENTS = 'dp_fedavg(noise_at="client", noise="system")'

PRIVATE = 'fedwon + dp_sgd(noise="system")'
VALIDATION = {"split": "validation"}
BEST = {"selection": "best_validation"}

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"methods": ("fedavg",)}, {"method": "fedbn"}, {}, "the method fedbn is not among"),
    ({"methods": ("fedbn",)}, {"method": "fedbn + agc(clip=1.0)"}, {}, "the method agc is not among"),
    ({}, {"method": 'ccst(mode="single")'}, {}, "per sample"),
    ({"data_derived_uploads": "nothing"}, {"method": "elcfs"}, {}, "data_derived_uploads is nothing"),
    ({}, {"model": "os:getcwd"}, {}, "the model os:getcwd would be imported"),
    ({"models": ("small_cnn",)}, {"model": "resnet18"}, {}, "the model resnet18 is not among"),
    ({}, {"init": "/etc/shadow"}, {}, "initial_weights does not name it"),
    ({}, {"model": 'torchvision:resnet18(weights="/etc/shadow")'}, {}, "initial_weights does not name it"),
    ({}, {"model": 'timm:resnet18(weights="/etc/shadow")'}, {}, "initial_weights does not name it"),
    ({"most_rounds": 5}, {"rounds": 6}, {}, "the run has 6 rounds"),
    ({"most_rounds": 5}, {"rounds": 5}, {"round": 7}, "round 7"),
    ({"most_rounds": 5}, {"rounds": 5}, {"facts": {"rounds": 900}}, "of 900"),
    ({"least_clients": 4}, {}, {}, "least_clients is 4"),
    ({}, {}, {"purpose": "newcomer"}, "newcomer is false"),
    ({}, {}, {"what": "entries", "purpose": "evaluation"}, "layers that stay at clients are asked for, and newcomer is false"),
    ({}, {}, {"what": "entries", "purpose": "training"}, "newcomer is false"),
    (
        {"newcomer": True, "dp_required": True},
        {"method": AT_CLIENTS},
        {"what": "entries"},
        "not part of the update that is clipped",
    ),
    ({}, {}, {"what": "gradients_of_each_sample"}, "declares no answer to the question 'gradients_of_each_sample'"),
    ({}, {}, {"what": "evaluate", "extras": {"split": "train"}}, "declares no answer to the question 'evaluate' of this form"),
    ({}, {}, {"what": "evaluate", "extras": {"split": ["validation"]}}, "declares no answer to the question 'evaluate'"),
    ({}, {}, {"what": "evaluate", "extras": VALIDATION}, "does not choose its round by them (selection is last)"),
    ({"scores": ("test",)}, BEST, {"what": "evaluate", "extras": VALIDATION}, "validation scores are asked for, and scores"),
    ({"scores": ("test",)}, {"selection": "best_local_validation"}, {}, "the run sends validation scores (selection is best_local"),
    ({"scores": ()}, {}, {"what": "evaluate", "extras": {"split": "test"}}, "test scores are asked for, and scores"),
    ({"scores": ()}, {}, {"what": "evaluate", "extras": {}}, "test scores are asked for, and scores"),
    (
        {"dp_required": True},
        {"method": PRIVATE},
        {"what": "evaluate", "extras": VALIDATION},
        "validation scores are asked for, which no",
    ),
    (
        {"dp_required": True},
        {"method": "ccst"},
        {"what": "ccst_collect"},
        "answer: ccst_collect are asked for, which no noise covers",
    ),
    (
        {"dp_required": True},
        {"method": f"fedbn + {AT_CLIENTS}"},
        {"what": "evaluate"},
        "test scores are asked for, which no noise covers (of a model with layers that stay at clients and get no noise)",
    ),
    ({"scores": ()}, {"method": f"fedbn + {AT_CLIENTS}"}, {"what": "evaluate"}, "test scores are asked for, and scores"),
    ({"class_counts": False}, {"loss": "weighted_focal"}, {}, "class_counts is false"),
    ({}, {"local_steps": 1, "batch_size": 1}, {}, "least_samples is 8"),
    ({"dp_required": True}, {}, {}, "adds no noise to what leaves, and dp_required is true"),
    ({"dp_required": True}, {"method": "fedwon + dp_sgd"}, {}, "takes its noise from the seed, which the server knows"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(epsilon=20.0, noise="system")'}, {}, "epsilon = 20, most_epsilon is 10"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(delta=0.99, noise="system")'}, {}, "delta = 0.99, most_delta is 1e-05"),
    (
        {"dp_required": True},
        {"method": AT_CLIENTS, "selection": "best_local_validation"},
        {},
        "sends validation scores, which no noise",
    ),
    ({"dp_required": True}, {"method": AT_CLIENTS, "loss": "weighted_focal"}, {}, "by class, and dp_required is true"),
    ({"dp_required": True}, {"method": 'feddg_ga + dp_sgd(noise="system")'}, {}, "which no noise covers"),
]


@pytest.mark.parametrize(("policy", "settings", "ask", "sentence"), CASES)
def test_what_the_node_does_not_allow_is_refused_by_name(
    policy: dict[str, Any], settings: dict[str, Any], ask: dict[str, Any], sentence: str
) -> None:
    found = Policy(data="x", **policy).problems(Settings(**settings), {"min-nodes": 3}, {"what": "train", **ask}, ask.get("extras"))
    assert any(sentence in problem for problem in found), found


@pytest.mark.parametrize("method", [AT_CLIENTS, PRIVATE, f"momentum + {AT_CLIENTS}", 'silobn + fedwon + dp_sgd(noise="system")'])
def test_scores_of_models_that_noise_covers_are_told_under_dp_required(method: str) -> None:
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
    monkeypatch.setattr("polyfed.deploy.policy.as_method", lambda _: telling)
    (found,) = Policy(data="x", dp_required=True).problems(Settings(method=AT_CLIENTS), {"min-nodes": 3}, {"what": "train"})
    assert "the run sends training loss, which no noise covers" in found


def test_noise_of_this_machine_on_all_that_leaves_is_what_dp_required_asks_for() -> None:
    settings = Settings(method='fedwon + dp_sgd(epsilon=8.0, noise="system") + agc')
    assert Policy(data="x", dp_required=True).problems(settings, {"min-nodes": 3}, {"what": "train"}) == []
    assert Policy(data="x", dp_required=True, most_epsilon=3.0).problems(settings, {"min-nodes": 3}, {})


def test_the_file_is_written_with_what_every_key_means_and_read_again(tmp_path: Path) -> None:
    policy = Policy(data="/srv/images", domain="pen", methods=("fedbn", "fedavg"), most_rounds=7)
    policy.write(tmp_path / "node.toml")
    text = (tmp_path / "node.toml").read_text()
    assert Policy.read(tmp_path / "node.toml") == policy
    assert all(item.metadata["doc"] in text for item in dataclasses.fields(Policy))
    assert (tmp_path / "node.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("newcommer = true", "Did you mean newcomer"),
        ("newcomer = 1", "takes true or false"),
        ('most_rounds = "many"', "takes a whole number"),
        ("most_rounds = 0", "at least 1"),
        ("most_epsilon = 0", "must be positive"),
        ("most_delta = 1.0", "must lie between 0 and 1"),
        ('most_epsilon = "8"', "takes a number"),
        ('methods = "fedbn"', "takes a list of texts"),
        ('scores = ["train"]', "scores cannot name 'train'"),
        ('data_derived_uploads = "all"', "cannot be 'all'"),
        ("= broken", "cannot be read"),
    ],
)
def test_a_file_that_would_not_do_what_it_says_is_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "node.toml").write_text(f'data = "x"\n{line}\n')
    with pytest.raises(SettingError, match=sentence):
        Policy.read(tmp_path / "node.toml")


@pytest.mark.parametrize(
    "secret",
    [
        "/srv/images/patient-7.png",
        "patient-7.dcm",
        "C:\\data\\scan 4.png",
        "'/srv/my images/patient 9.png'",
        "~/x/y",
        "../state/a.safetensors",
    ],
)
def test_no_path_and_no_file_name_leaves_in_an_error(secret: str) -> None:
    left = what_may_leave(refusal(f"Client pen cannot read {secret}: no such file"), Policy(data="x"), False).control["problem"]
    assert not set(secret.strip("'").replace("\\", "/").split("/")) & set(left.replace("/", " ").split())
    assert "patient" not in left and "scan" not in left and left.startswith("Client pen cannot read")


def test_sentences_without_paths_stay_as_they_are() -> None:
    sentence = "Refused by pen (its node.toml): the run has 6 rounds, most_rounds is 5."
    assert without_paths(sentence) == sentence


def test_code_that_no_listed_bundle_brought_is_refused() -> None:
    """Also files that lie on this machine anyway, such as those of Python itself."""
    assert "antigravity.py" in unlisted_code(["antigravity.py"])[0]
    assert "/etc/x.py" in unlisted_code(["/etc/x.py"])[0]
    assert unlisted_code([]) == []


def test_class_counts_are_told_evenly_where_they_may_not_be_told() -> None:
    answer = WireMessage({"ok": True, "description": {"client": "pen", "class_counts": [9, 1, 1]}})
    assert what_may_leave(answer, Policy(data="x"), True).control["description"]["class_counts"] == [9, 1, 1]
    hidden = what_may_leave(answer, Policy(data="x", class_counts=False), True).control["description"]["class_counts"]
    assert hidden == evenly([9, 1, 1]) == [4, 4, 3]
    assert what_may_leave(answer, Policy(data="x", dp_required=True), True).control["description"]["class_counts"] == hidden
