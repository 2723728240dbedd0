"""Asks that ``node.toml`` does not allow: what it says, the settings of the run, the ask, and a piece of the sentence that refuses it."""

from __future__ import annotations

from typing import Any

AT_CLIENTS = 'dp_fedavg(noise_at="client", noise="system")'

PRIVATE = 'fedwon + dp_sgd(noise="system")'
VALIDATION = {"split": "validation"}
BEST = {"selection": "best_validation"}

CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"methods": ("fedavg",)}, {"method": "fedbn"}, {}, "methods does not list the method fedbn"),
    ({"methods": ("fedbn",)}, {"method": "fedbn + agc(clip=1.0)"}, {}, "methods does not list the method agc"),
    ({}, {"method": 'ccst(mode="single")'}, {}, "per sample"),
    ({"data_derived_uploads": "nothing"}, {"method": "elcfs"}, {}, "data_derived_uploads is nothing"),
    ({}, {"model": "os:getcwd"}, {}, "the model os:getcwd would be imported"),
    ({"models": ("small_cnn",)}, {"model": "resnet18"}, {}, "models does not list the model resnet18"),
    ({}, {"init": "/etc/shadow"}, {}, "initial_weights does not list it"),
    ({}, {"model": 'torchvision:resnet18(weights="/etc/shadow")'}, {}, "initial_weights does not list it"),
    ({}, {"model": 'timm:resnet18(weights="/etc/shadow")'}, {}, "initial_weights does not list it"),
    ({"max_rounds": 5}, {"rounds": 6}, {}, "the run has 6 rounds"),
    ({"max_rounds": 5}, {"rounds": 5}, {"round": 7}, "round 7"),
    ({"max_rounds": 5}, {"rounds": 5}, {"facts": {"rounds": 900}}, "of 900"),
    ({"min_clients": 4}, {}, {}, "min_clients is 4"),
    ({}, {}, {"purpose": "newcomer"}, "newcomer is false"),
    (
        {},
        {},
        {"what": "entries", "purpose": "evaluation"},
        "the server requests layers that stay at clients, but newcomer is false",
    ),
    ({}, {}, {"what": "entries", "purpose": "training"}, "newcomer is false"),
    (
        {"newcomer": True, "dp_required": True},
        {"method": AT_CLIENTS},
        {"what": "entries"},
        "not part of the clipped update",
    ),
    ({}, {}, {"what": "gradients_of_each_sample"}, "declares no reply to the request 'gradients_of_each_sample'"),
    ({}, {}, {"what": "evaluate", "extras": {"split": "train"}}, "declares no reply to the request 'evaluate' in this form"),
    ({}, {}, {"what": "evaluate", "extras": {"split": ["validation"]}}, "declares no reply to the request 'evaluate'"),
    ({}, {}, {"what": "evaluate", "extras": VALIDATION}, "does not select its round by them (selection is last)"),
    ({"scores": ("test",)}, BEST, {"what": "evaluate", "extras": VALIDATION}, "the server requests validation scores, but scores"),
    ({"scores": ("test",)}, {"selection": "best_local_validation"}, {}, "the run sends validation scores (selection is best_local"),
    ({"scores": ()}, {}, {"what": "evaluate", "extras": {"split": "test"}}, "the server requests test scores, but scores"),
    ({"scores": ()}, {}, {"what": "evaluate", "extras": {}}, "the server requests test scores, but scores"),
    (
        {"dp_required": True},
        {"method": PRIVATE},
        {"what": "evaluate", "extras": VALIDATION},
        "the server requests validation scores, which no",
    ),
    (
        {"dp_required": True},
        {"method": "ccst"},
        {"what": "ccst_collect"},
        "answer: ccst_collect, which no noise covers",
    ),
    (
        {"dp_required": True},
        {"method": f"fedbn + {AT_CLIENTS}"},
        {"what": "evaluate"},
        "test scores, which no noise covers (of a model with layers that stay at clients and get no noise)",
    ),
    ({"scores": ()}, {"method": f"fedbn + {AT_CLIENTS}"}, {"what": "evaluate"}, "the server requests test scores, but scores"),
    ({"class_counts": False}, {"loss": "weighted_focal"}, {}, "class_counts is false"),
    ({}, {"local_steps": 1, "batch_size": 1}, {}, "min_samples is 8"),
    ({"dp_required": True}, {}, {}, "adds no noise to uploads, but dp_required is true"),
    ({"dp_required": True}, {"method": "fedwon + dp_sgd"}, {}, "draws noise from the seed, which the server knows"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(epsilon=20.0, noise="system")'}, {}, "epsilon = 20, but max_epsilon is 10"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(delta=0.99, noise="system")'}, {}, "delta = 0.99, but max_delta is 1e-05"),
    (
        {"dp_required": True},
        {"method": AT_CLIENTS, "selection": "best_local_validation"},
        {},
        "sends validation scores, which no noise",
    ),
    ({"dp_required": True}, {"method": AT_CLIENTS, "loss": "weighted_focal"}, {}, "may need class counts, but dp_required is true"),
    ({"dp_required": True}, {"method": 'feddg_ga + dp_sgd(noise="system")'}, {}, "which no noise covers"),
]
