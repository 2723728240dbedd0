"""Every registered method keeps the contract; there is no list to maintain."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping

import pytest
import torch

from helpers.method_texts import WITHOUT_BATCH_NORM, as_trained
from polyfed.core.client import Client, Step
from polyfed.core.method import Facts, Method, methods, parse
from polyfed.core.part import Part
from polyfed.core.replies import RequestContext
from polyfed.core.rounds import Reply
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, batch_norm, keep_local
from polyfed.extras import Array
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import ContractBroken, TinyNet, check_method, tiny_federation


@pytest.mark.parametrize("name", methods.names())
def test_every_registered_method_keeps_the_contract(name: str) -> None:
    if name in WITHOUT_BATCH_NORM:
        pytest.importorskip("opacus", reason="needs the privacy extra")
    check_method(as_trained(name))


def test_every_method_documents_its_formula_and_reference_in_this_order() -> None:
    for record in map(methods.find, methods.names()):
        if record.build.__module__.startswith("polyfed.methods."):
            form = (
                r"[^\n]+\.\n\n {4}\S.*?^Args:\n.*?^Reference:\n {4}\S"
                if record.signature.parameters
                else r"[^\n]+\.\n\n {4}\S.*?^Reference:\n {4}\S"
            )
            assert re.match(form, record.doc, re.DOTALL | re.MULTILINE), record.name


@pytest.mark.parametrize(
    "text",
    [
        "fedbn + agc(clip=1.28) + fedprox(mu=0.01)",
        'silobn + momentum(keep="global")',
        "central + group_norm(groups=2)",
        'fedavg(statistics="first")',
        'fedavg(statistics="local")',
        "group_norm(groups=2) + weight_standard",
        "static_bn + agc(clip=1.28)",
        'feddna(merge="moments")',
        'partialfed_fix(skip=("head",)) + fedbn + agc(clip=1.28)',
        "fixup + agc(clip=1.28)",
        "fedbn + partialfed_adaptive + agc(clip=1.28)",
        "fedbn + fedgma(tau=0.3) + agc",
        'fedgma(tau=0.5, server_lr=0.1, variant="average_plus_step")',
        'feddg_ga(center=False, metric="accuracy") + fedbn',
        "fedbn + rsc + mixstyle(p=1.0)",
        "fedbn + ibn + guiding + agc",
        'fixbn + dson(exact=False) + mixstyle(p=1.0, after="branch")',
        "dson(domain_specific=True) + guiding",
        "fedbn + fedsr(width=5, squared=True) + mixstyle",
        'fedsr + rsc + guiding + momentum(keep="local")',
        "fedbn + quantise(bits=4) + fedadam",
        "silobn + topk(share=0.1) + fednova",
        "scaffold(server_lr=0.7) + fedbn + median",
        "fixbn + krum(keep=2)",
        'gperxan(guide=1.0, where="stem", rest="shared", mix_local="both", in_init="ones")',
        'perxan(where=("branch",), mix_local="none", tiny_maps="skip")',
        'gperxan + momentum(keep="local") + fedprox(mu=0.01)',
        "fedbn + guiding(weight=1.0)",
        'fedstein(variant="server")',
        'fedstein(variant="eval_only")',
        "fedstein(shrink=False)",
        'fedstein + momentum(keep="local")',
        'fixbn(freeze_at=1, freeze="both") + momentum(keep="global")',
        'central + fixbn(freeze_at=1, freeze="affine")',
        'agc(clip=1.28) + fedprox(mu=0.01) + fixbn(freeze_at=1) + momentum(keep="local")',
        'fixbn(freeze_at=1, stage_one="decoupled")',
        "fedtan + agc(clip=1.28)",
        'fedprox(mu=0.01) + fedtan + momentum(keep="global")',
        "fedwon + agc(clip=0.64)",
        'fedwon(bias="keep", form="equation", gamma=1.7139)',
        'fedwon(init="keep", plain=("stem.*",))',
        'pfedhn(server_update="joint")',
        'hfedf(generate="head", warmup=1)',
        'hfedf(embedding="random") + fedprox(mu=0.1)',
    ],
)
def test_variants_and_joined_methods_keep_it_too(text: str) -> None:
    check_method(parse(text))


def upload_batch_norm(client: Client, entries: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return entries | {"stem.1.weight": client.bench.live["stem.1.weight"].detach().clone()}


def global_noise(step: Step) -> torch.Tensor:
    return step.task_loss * random.random()


class Forgetful(Part):
    """Counts rounds in itself instead of in the client's memory, so a resumed run differs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: Step) -> torch.Tensor:
        self.calls += 1
        return step.task_loss * (self.calls % 7) / 7


def remember(client: Client) -> None:
    client.memory["seen"] = client.memory.get("seen", 0) + 1


def leak_labels(client: Client) -> dict[str, object]:
    return {"labels": client.data.train.labels}


def labels_shape(context: RequestContext) -> tuple[int, ...]:
    return (context.info.samples,)


LABELS = Array(labels_shape, torch.int64, 0, 2)


class Anything:
    """Takes every value, so that one client can stop the run."""

    required = True

    def problem(self, value: object, context: RequestContext) -> str:
        return ""


def add_labels(server: Server, extras: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for sent in extras.values():
        sent["labels"].sum()


def send_everything(server: Server, client: str) -> dict[str, torch.Tensor]:
    return dict(server.state)


class Stepping(Part):
    """Steps a remembered number in place as soon as a reply is weighed, so a repeated round begins one further."""

    def __call__(self, server: Server, reply: Reply) -> float:
        counted = server.persistent("counted", lambda: {"replies": 0})
        counted["replies"] += 1
        return 1.0 + counted["replies"] % 5


WRONG = {
    "does not send down": Method(
        "sends_too_much", sharing=(Rule(batch_norm, down=False),), outgoing=send_everything, facts=Facts(client_state=True)
    ),
    "in which round 2 is retried": Method("steps_in_place", weighting=Stepping()),
    "the plan": Method(
        "uploads_local", sharing=(keep_local(batch_norm),), uploads=(upload_batch_norm,), facts=Facts(client_state=True)
    ),
    "draws from the global random generators": Method("uses_global_random", objective=(global_noise,)),
    "client_state": Method("hides_state", before_training=(remember,)),
    "data_derived_uploads": Method("leaks", after_training=(leak_labels,), reply_extras={"train": {"labels": LABELS}}),
    "sends the extra 'labels' in its reply to 'train', but reply_extras does not declare": Method(
        "forgets_to_declare",
        after_training=(leak_labels,),
        facts=Facts(data_derived_uploads="labels", granularity="per sample"),
    ),
    "in which 'labels' is None stops the run": Method(
        "declares_too_little",
        after_training=(leak_labels,),
        after_round=(add_labels,),
        reply_extras={"train": {"labels": Anything()}},
        facts=Facts(data_derived_uploads="labels", granularity="per sample"),
    ),
    "training fails although the facts allow it": Method("says_one_is_enough", facts=Facts(smallest_batch=1)),
}


@pytest.mark.parametrize("broken", WRONG)
def test_a_wrong_method_fails_and_the_sentence_says_why(broken: str) -> None:
    with pytest.raises(ContractBroken, match=broken):
        check_method(WRONG[broken])


def gradient_of_the_second_pass(step: Step) -> torch.Tensor:
    client = step.client
    client.forward(step.index, step.x, step.y)
    loss = client.full_loss(client.forward(step.index, step.x, step.y))
    client.optimizer.zero_grad()
    loss.backward()
    return loss


TWO_PASSES = Method("two_passes", batch_gradient=gradient_of_the_second_pass, facts=Facts(passes=2))


def test_a_method_with_two_passes_per_step_must_declare_them() -> None:
    with pytest.raises(ContractBroken, match=r"drops the reply of client big: .*num_batches_tracked.* Facts\(passes=2\)"):
        check_method(dataclasses.replace(TWO_PASSES, facts=Facts()))


def test_a_method_with_two_declared_passes_trains_for_several_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    check_method(TWO_PASSES)
    assert capsys.readouterr().out == "two_passes passed check_method.\n"
    experiment = Experiment(Settings(rounds=1, local_epochs=5, batch_size=4), tiny_federation(), TWO_PASSES, TinyNet())
    experiment.train()
    assert not experiment.server.rejected
    # 13 images: batches of 4, 4 and 5, since a last batch of one is merged.
    assert int(experiment.server.state["stem.1.num_batches_tracked"]) == 5 * 3 * 2


def test_state_kept_outside_the_run_fails() -> None:
    with pytest.raises(ContractBroken, match=r"identical runs|resumed"):
        check_method(Method("forgetful", objective=(Forgetful(),)))
