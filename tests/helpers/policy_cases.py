"""Asks that ``node.toml`` does not allow: what it says, the settings of the run, the ask, and a piece of the sentence that refuses it."""

from __future__ import annotations

from typing import Any

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
    ({"max_rounds": 5}, {"rounds": 6}, {}, "the run has 6 rounds"),
    ({"max_rounds": 5}, {"rounds": 5}, {"round": 7}, "round 7"),
    ({"max_rounds": 5}, {"rounds": 5}, {"facts": {"rounds": 900}}, "of 900"),
    ({"min_clients": 4}, {}, {}, "min_clients is 4"),
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
    ({}, {"local_steps": 1, "batch_size": 1}, {}, "min_samples is 8"),
    ({"dp_required": True}, {}, {}, "adds no noise to what leaves, and dp_required is true"),
    ({"dp_required": True}, {"method": "fedwon + dp_sgd"}, {}, "takes its noise from the seed, which the server knows"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(epsilon=20.0, noise="system")'}, {}, "epsilon = 20, max_epsilon is 10"),
    ({"dp_required": True}, {"method": 'fedwon + dp_sgd(delta=0.99, noise="system")'}, {}, "delta = 0.99, max_delta is 1e-05"),
    (
        {"dp_required": True},
        {"method": AT_CLIENTS, "selection": "best_local_validation"},
        {},
        "sends validation scores, which no noise",
    ),
    ({"dp_required": True}, {"method": AT_CLIENTS, "loss": "weighted_focal"}, {}, "by class, and dp_required is true"),
    ({"dp_required": True}, {"method": 'feddg_ga + dp_sgd(noise="system")'}, {}, "which no noise covers"),
]
