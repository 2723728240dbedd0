"""The server distrusts nodes, with real processes: three honest nodes and two that lie, over one SuperLink.

``tests/flower/test_distrust.py`` tells the same lies in one process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Message

from helpers.flower_fakes import FakeGrid
from helpers.flower_harness import Ended, Trial
from helpers.flower_runs import LISTED, NODES, SMALL, SUPERNODE, Site, digest_in, in_process, settings_for
from helpers.hostile_app import SERVER_APP
from helpers.hostile_server import called, listening
from helpers.lying_executor import DESCRIPTION, LIES, ODD, PARTS, REFUSAL
from helpers.odd_descriptions import ODD_NODES
from polyfed.flower.app import write_app
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire.descriptions import own_versions
from polyfed.flower.wire.message import WireMessage
from polyfed.flower.wire.records import records_of, wire_message_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings

pytestmark = [pytest.mark.flower, pytest.mark.slow]

LIARS = ("post", "print")
CLASSES = 10
ALL = dataclasses.replace(SMALL, unseen=())
"""The settings of runs in process in which the liars' domains take part too."""


@dataclass
class LyingSite(Site):
    """With a place where the ServerApp of a test calls."""

    listener: socket.socket = field(kw_only=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingSite]:
    folder = tmp_path_factory.mktemp("liars")
    configs = [f'domain="{name}" state="{folder / "state" / name}" code="{LISTED}"' for name in (*NODES, *LIARS)]
    command = ("python", "-m", "helpers.lying_executor")
    with listening() as (listener, variables), Trial(folder, configs, variables, command, SUPERNODE) as trial:
        yield LyingSite(trial, folder, listener=listener)


def run(site: Site, settings: Settings, out: Path | None = None, **lies: dict[str, Any]) -> Ended:
    """A run in which the liars tell these lies."""
    tell(site, **lies)
    ended = site.run(dataclasses.replace(settings, unseen=()), out=out)
    assert ended.status == "finished:completed", ended.log
    return ended


def tell(site: Site, **lies: dict[str, Any]) -> None:
    """What the liars say from now on; a liar without a lie is honest."""
    for name in LIARS:
        file = site.folder / "state" / name / LIES
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(lies.get(name, {})))


def describing(**values: Any) -> dict[str, Any]:
    return {DESCRIPTION: values}


def left_out(log: str) -> list[str]:
    """What the server says of nodes that it leaves out, in alphabetical order."""
    return sorted(line.split("cannot take part: ")[1] for line in log.splitlines() if "cannot take part: " in line)


def counts(number: int) -> dict[str, Any]:
    """A description of so many examples, all of one class."""
    return describing(class_counts=[number, *[0] * (CLASSES - 1)], samples=number)


def test_another_class_list_and_zero_samples_are_left_out_by_name(site: Site) -> None:
    ended = run(site, settings_for("fedbn"), post=describing(classes=[f"x{n}" for n in range(CLASSES)]), print=counts(0))
    said = left_out(ended.log)
    assert len(said) == 2 and "it has no training examples" in "".join(said), said
    assert "post has x0, x1, x2, x3, x4, ... (10). All nodes need the same classes in the same order." in "".join(said)
    assert digest_in(ended.log) == in_process(settings_for("fedbn")).digest


def test_counts_of_1e12_and_2e7_samples_are_left_out_by_name(site: Site) -> None:
    ended = run(site, settings_for("fedbn"), post=counts(10**12), print=counts(2 * 10**7))
    said = left_out(ended.log)
    assert ["got 1000000000000" in text or "got 20000000" in text for text in said] == [True, True], said
    assert digest_in(ended.log) == in_process(settings_for("fedbn")).digest


def test_who_had_a_name_keeps_it_when_the_run_goes_on_and_a_node_that_names_code_is_left_out(site: Site) -> None:
    out = site.folder / "goes-on"
    first = run(
        site, settings_for("fedbn"), out, post=describing(samples=0), print=describing(client="a", default_model="os:getcwd")
    )
    assert any("that of a is custom code, which nodes may not choose for the server" in text for text in left_out(first.log))
    again = run(site, settings_for("fedbn"), out, post=describing(client="pen"), print=describing(client="pen"))
    said = left_out(again.log)
    assert len(said) == 2 and all(text.startswith("It reports the client name pen, which belongs to node ") for text in said), said
    assert digest_in(again.log) == digest_in(first.log) == in_process(settings_for("fedbn")).digest


def test_of_two_nodes_that_say_the_same_name_at_the_start_none_is_believed(site: Site) -> None:
    ended = run(site, settings_for("fedbn"), post=describing(client="pen"))
    said = left_out(ended.log)
    assert len(said) == 2 and all("all report the client name pen, so none of them takes part" in text for text in said), said
    others = dataclasses.replace(SMALL, unseen=("pen", "post"))
    assert digest_in(ended.log) == in_process(settings_for("fedbn", others)).digest


def test_not_finite_replies_are_dropped_and_names_lose_their_control_characters(site: Site) -> None:
    refusal = {"ok": False, "kind": "not_finite", "problem": "the loss became \x1b[31mnan"}
    ended = run(site, settings_for("fedavg"), post={REFUSAL: refusal}, print=describing(client="pr\x1b[2J\x07int"))
    assert "Client pr[2Jint: print, " in ended.log
    for number in (1, 2):
        assert f"Round {number}: client post is dropped: the loss became [31mnan" in ended.log
        assert (
            f"Round {number}: client pr[2Jint is dropped: This node is client print, but the request is for client pr[2Jint"
            in ended.log
        )
    assert "\x1b[2J" not in ended.log and "\x07" not in ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedavg")).digest


def test_bounds_hold_against_a_node_that_claims_many_samples_and_sends_a_large_update(site: Site, tmp_path: Path) -> None:
    settings = settings_for('fedavg + faulty(client="post", round=1, what="large")', dataclasses.replace(ALL, rounds=1))
    bounded = dataclasses.replace(settings, max_weight_share=0.5, max_update_norm=0.5)
    lies = {"post": counts(10**6), "print": describing(versions={**own_versions(), "polyfed": "9.9"})}
    ended = run(site, bounded, **lies)
    (said,) = left_out(ended.log)
    assert "its versions differ: polyfed 9.9" in said
    expected = over_fakes(bounded, lies["post"], tmp_path)
    assert digest_in(ended.log) == expected.digest
    assert re.search(r"scaled the update of client post from norm \S+ to 0.5", ended.log)
    server = expected.experiment.server
    weights = server.default_weights(server.client_ids)
    assert weights["post"] == sum(weights.values()) / 2
    start = Experiment(bounded).server.state
    moved = sum(
        float((server.state[name].double() - value.double()).square().sum())
        for name, value in start.items()
        if value.is_floating_point()  # batch norm's counters have a bound of their own
    )
    assert 0 < moved <= 0.5**2


def test_every_odd_description_is_left_out_by_name(site: LyingSite) -> None:
    app = site.folder / "app-odd"
    write_app(app, dataclasses.replace(settings_for("fedavg"), unseen=()), "odd", SERVER_APP)
    names = list(ODD_NODES)
    submitted = site.trial.submit(app)
    with called(site.listener) as asking:
        for first, second in zip(names[::2], names[1::2], strict=True):
            tell(site, post={ODD: first}, print={ODD: second})
            clients, said = asking.gathered(len(NODES))
            assert sorted(clients) == sorted(NODES), (first, second, clients)
            said = [text for text in said if "cannot take part: " in text]
            wanted = [ODD_NODES[name][1] for name in (first, second)]
            assert any(all(map(operator.contains, order, wanted)) for order in itertools.permutations(said, 2)), (wanted, said)
        tell(site)
        clients, said = asking.gathered(len(NODES))
        assert sorted(clients) == sorted([*NODES, *LIARS]) and said == []
    assert site.trial.ended(submitted).status == "finished:completed"


def test_an_answer_whose_parts_do_not_fit_together_leaves_only_its_node_out(site: Site) -> None:
    ended = run(site, settings_for("fedavg"), post={PARTS: True}, print=describing(samples=0))
    for number in (1, 2):
        assert f"Round {number}: client post is dropped: its reply is malformed (" in ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedavg")).digest


UNLISTED = """
import sys
from pathlib import Path
import polyfed

if not sys.argv[0].endswith("flwr-serverapp"):
    Path("MARK").touch()


@polyfed.register
def unlisted() -> polyfed.Method:
    return polyfed.Method("unlisted", standalone=False)
"""
"""A method that leaves a mark where it is loaded, except at the server, whose own code it is."""


def test_code_that_nodes_do_not_list_is_not_run(site: Site, tmp_path: Path) -> None:
    tell(site)
    file, mark = tmp_path / "unlisted.py", tmp_path / "ran"
    text = UNLISTED.replace("MARK", str(mark))
    file.write_text(text)
    ended = site.run(dataclasses.replace(settings_for("fedavg"), load=(str(file),)))
    own = hashlib.sha256(text.encode()).hexdigest()
    assert ended.status == "finished:failed" and "0 of 3 nodes can take part" in ended.log, ended.log
    assert ended.log.count(f"does not allow the code in unlisted.py (SHA-256 {own})") >= len((*NODES, *LIARS))
    assert not mark.exists()


def over_fakes(settings: Settings, boast: dict[str, Any], folder: Path) -> Result:
    """The same run over a Grid in this process, with the same lie."""

    def meddle(asked: Message, answered: Message) -> Message:
        told = dict(wire_message_of(answered.content).control)
        if told.get(DESCRIPTION, {}).get("client") == "post":
            answered.content = records_of([WireMessage({**told, DESCRIPTION: {**told[DESCRIPTION], **boast[DESCRIPTION]}})])[0]
        return answered

    settings = settings.trusted()
    configs = {number: {"domain": name} for number, name in enumerate((*NODES, "post"), 1)}
    grid = FakeGrid(settings, folder / "nodes", configs, meddle)
    return run_on_grid(grid, settings, {"out": str(folder / "run"), "min-nodes": len(configs), "wait": 1.0})  # type: ignore[arg-type]
