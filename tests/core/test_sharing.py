"""What travels: entries by module type, rules, the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from polyfed.core.entries import entries_of, find_head, optimizer_entries
from polyfed.core.method import parse
from polyfed.core.reducers import First, Mean
from polyfed.core.rounds import NEWCOMER, TRAINING, Reply, Request
from polyfed.core.sharing import (
    Plan,
    Rule,
    Select,
    batch_norm,
    bn_affine,
    bn_statistics,
    check_none_redundant,
    everything,
    keep_local,
    momentum_buffers,
    reduce_with,
    upload_only,
)
from polyfed.errors import ModelError, SharingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation


def small_resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)


def batch_norm_names(model: nn.Module) -> set[str]:
    """Worked out from the modules themselves, not from polyfed."""
    return {
        f"{path}.{key}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for key in module.state_dict()
    }


def test_shortcut_norms_with_unhelpful_names_are_found() -> None:
    model = torchvision.models.resnet18(num_classes=3)
    found = {name for name, entry in entries_of(model).items() if entry.layer == "batch_norm"}
    assert found == batch_norm_names(model)
    assert len({name.rsplit(".", 1)[0] for name in found}) == 20
    assert {name for name in found if "downsample" in name} and not any("bn" in name for name in found if "downsample" in name)


def test_kinds_of_every_entry_of_the_tiny_net() -> None:
    kinds = {name: entry.kind for name, entry in entries_of(TinyNet(), "head").items()}
    assert kinds == {
        "stem.0.weight": "weight",
        "stem.1.weight": "norm_affine",
        "stem.1.bias": "norm_affine",
        "stem.1.running_mean": "norm_stat",
        "stem.1.running_var": "norm_stat",
        "stem.1.num_batches_tracked": "norm_count",
        "branch.0.weight": "weight",
        "branch.0.bias": "weight",
        "branch.1.weight": "norm_affine",
        "branch.1.bias": "norm_affine",
        "branch.1.running_mean": "norm_stat",
        "branch.1.running_var": "norm_stat",
        "branch.1.num_batches_tracked": "norm_count",
        "head.weight": "head",
        "head.bias": "head",
    }


def test_the_head_is_found_named_or_in_doubt() -> None:
    x = torch.zeros(2, 3, 8, 8)
    assert find_head(TinyNet(), x) == ("head", "")
    assert find_head(small_resnet(), torch.zeros(2, 3, 32, 32)) == ("fc", "")
    doubtful = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.Softmax(dim=1))
    assert find_head(doubtful, x)[0] is None and "--head" in find_head(doubtful, x)[1]
    assert find_head(doubtful, x, "1") == ("1", "")
    with pytest.raises(ModelError, match="head"):
        find_head(TinyNet(), x, "heed")


def test_a_models_own_classifier_wins() -> None:
    class Own(TinyNet):
        def get_classifier(self) -> nn.Module:
            return self.branch

    assert find_head(Own(), torch.zeros(2, 3, 8, 8)) == ("branch", "")


def test_state_that_is_no_tensor_is_refused() -> None:
    class Strange(TinyNet):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(ModelError, match="_extra_state"):
        entries_of(Strange())


def test_rules_set_single_aspects() -> None:
    plan = Plan(entries_of(TinyNet()), [keep_local(bn_statistics), reduce_with(bn_affine, First())], rounds=3)
    phase = plan.at(1)
    assert phase.travels["stem.1.weight"].reduce == First() and phase.travels["stem.1.weight"].up
    assert phase.travels["stem.0.weight"].reduce == Mean()
    assert set(phase.kept) == {n for n in batch_norm_names(TinyNet()) if "running" in n or "num_batches" in n}


def test_disagreement_names_both_parts_and_the_entry() -> None:
    rules = [Rule(batch_norm, up=False, part="one"), Rule(bn_affine, up=True, part="two")]
    with pytest.raises(SharingError, match=r"one and two disagree on stem\.1\.weight"):
        Plan(entries_of(TinyNet()), rules, rounds=1)


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    with pytest.raises(SharingError, match="no batch norm"):
        Plan(entries_of(bare), [Rule(batch_norm, up=False, part="fedbn")], rounds=1)
    with pytest.raises(SharingError, match="fedbn"):
        Experiment(Settings(method="fedbn"), tiny_federation(), model=bare)


def test_a_reduction_of_what_never_travels_is_an_error() -> None:
    rules = [keep_local(batch_norm), Rule(bn_affine, reduce=First(), part="firsts")]
    with pytest.raises(SharingError, match=r"firsts has no effect"):
        Plan(entries_of(TinyNet()), rules, rounds=1)


def test_a_part_that_changes_nothing_beside_another_is_an_error() -> None:
    rules = parse("fedbn + silobn").sharing
    with pytest.raises(SharingError, match="silobn has no effect in combination with fedbn"):
        check_none_redundant(entries_of(TinyNet()), rules, 1, ["fedbn", "silobn"])
    check_none_redundant(entries_of(TinyNet()), rules, 1, ["fedbn"])
    with pytest.raises(SharingError, match="silobn has no effect"):
        Experiment(Settings(method="fedbn + silobn"), tiny_federation(), model=TinyNet())


def test_rules_may_start_at_a_round_or_a_share_of_rounds() -> None:
    for since in (2, 0.5):
        plan = Plan(entries_of(TinyNet()), [Rule(bn_statistics, up=False, since=since)], rounds=5)
        assert ["stem.1.running_mean" in plan.at(r).up for r in (1, 2, 3, 5)] == [True, True, False, False]


def test_upload_only_goes_up_and_never_down() -> None:
    phase = Plan(entries_of(TinyNet()), [upload_only(batch_norm)], rounds=1).at(1)
    names = batch_norm_names(TinyNet())
    assert names <= set(phase.up) and not names & set(phase.down) and names == set(phase.kept)


def test_momentum_follows_its_parameter() -> None:
    entries = entries_of(TinyNet())
    entries |= optimizer_entries(entries, ("momentum_buffer",))
    rules = [keep_local(batch_norm), Rule(momentum_buffers, up=True, down=True)]
    travels = Plan(entries, rules, rounds=1).at(1).travels
    assert travels["optimizer/momentum_buffer/stem.0.weight"].up
    local = travels["optimizer/momentum_buffer/stem.1.weight"]
    assert not local.up and not local.down and local.keep


def test_everything_means_the_model_and_names_may_be_patterns() -> None:
    entries = entries_of(TinyNet())
    buffers = optimizer_entries(entries, ("momentum_buffer",))
    assert all(everything.matches(e) for e in entries.values()) and not any(everything.matches(e) for e in buffers.values())
    assert [n for n, e in entries.items() if Select("stem", names=("stem.0.*",)).matches(e)] == ["stem.0.weight"]


def travelled(
    method: str, model: nn.Module, federation: Any = None, **changes: Any
) -> tuple[Experiment, list[tuple[Request, list[Reply]]]]:
    """Train and note every message."""
    experiment = Experiment(
        Settings(method=method, rounds=2, batch_size=4, **changes), federation or tiny_federation(), model=model
    )
    seen: list[tuple[Request, list[Reply]]] = []
    carried = experiment.backend

    class Watching(type(carried)):  # type: ignore[misc]
        def __call__(self, request: Request) -> Any:
            replies: list[Reply] = []
            seen.append((request, replies))
            for reply in super().__call__(request):
                replies.append(reply)
                yield reply

    carried.__class__ = Watching
    experiment.train()
    return experiment, seen


def test_no_training_message_of_fedbn_carries_a_batch_norm_entry_even_on_a_resnet() -> None:
    model = small_resnet()
    forbidden = batch_norm_names(model)
    experiment, seen = travelled("fedbn", model)
    assert len(seen) == 2
    for ask, replies in seen:
        assert len(replies) == 3
        for payload in [*ask.payloads.values(), *(reply.payload for reply in replies)]:
            assert not forbidden & set(payload.entries)
            assert set(payload.entries) == set(model.state_dict()) - forbidden
    before = dict(experiment.costs.bytes["up"])
    assert NEWCOMER not in before
    experiment.evaluate()
    collected = [(ask, replies) for ask, replies in seen if ask.purpose == NEWCOMER]
    assert len(collected) == 1 and all(set(r.entries) == forbidden for r in collected[0][1])
    assert experiment.costs.total("up", NEWCOMER) >= 3 * sum(model.state_dict()[n].numel() for n in forbidden) * 4
    assert experiment.costs.bytes["up"][TRAINING] == before[TRAINING]


def test_bytes_are_those_of_the_entries() -> None:
    experiment, _ = travelled("silobn", TinyNet())
    state = TinyNet().state_dict()
    private = {n for n in state if "running" in n or "num_batches" in n}
    expected = 2 * 3 * sum(v.numel() * v.element_size() for n, v in state.items() if n not in private)
    assert experiment.costs.total("up") == experiment.costs.total("down") == expected
    assert set(experiment.costs.bytes["up"][TRAINING]) == {"weight", "norm_affine", "head"}


def test_local_sends_nothing_at_all() -> None:
    experiment, _ = travelled("local", TinyNet())
    assert experiment.costs.total("up") == experiment.costs.total("down") == 0


def test_global_momentum_doubles_what_is_trainable() -> None:
    with_it, seen = travelled('momentum(keep="global")', TinyNet(), momentum=0.9)
    trainable = sum(p.numel() * 4 for p in TinyNet().parameters())
    assert with_it.costs.bytes["up"][TRAINING]["momentum"] == 2 * 3 * trainable
    # In round 1 there is no buffer to send yet.
    assert with_it.costs.bytes["down"][TRAINING]["momentum"] == 1 * 3 * trainable
    assert not any(n.startswith("optimizer/") for n in next(iter(seen[0][0].payloads.values())).entries)


def test_fedbn_entries_of_a_client_are_untouched_by_communication() -> None:
    experiment, _ = travelled("fedbn", TinyNet())
    for client in ("big", "small"):
        kept = experiment.backend.client_states[client].entries
        assert set(kept) == batch_norm_names(TinyNet())
    big, small = (experiment.backend.client_states[c].entries["stem.1.running_mean"] for c in ("big", "small"))
    assert not torch.equal(big, small)
