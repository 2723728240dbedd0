"""Costs relative to FedAvg: bytes computed by hand from tensor shapes, and measured memory and CPU time."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as pf
from helpers.command_line import SHORT, Command, says
from helpers.report_page import words
from polyfed.backends import process_memory
from polyfed.core.client import Client
from polyfed.core.method import Facts, Method, parse
from polyfed.core.rounds import Exchange
from polyfed.core.server import Server
from polyfed.runs import costs as meter
from polyfed.runs.costs import Costs
from polyfed.runs.result import Result
from polyfed.studies.report.costs import Expense, Spent, Totals, cells, cost_json, spent, totals
from polyfed.studies.report.html import render
from polyfed.studies.report.run_record import RunRecord
from polyfed.studies.report.run_set import MethodRow
from polyfed.studies.report.sections import expenses
from polyfed.testing import TinyNet, tiny_federation

SPECTRUM = 3 * 8 * 8 * 4  # an amplitude spectrum of an image of 3 x 8 x 8, in float32
STYLE = 2 * 3 * 4  # a mean and a standard deviation of three channels
PARAMETERS = (8 * 3 * 9 + 16) + (8 * 8 * 9 + 8 + 16) + (3 * 8 + 3)  # of TinyNet: convolutions, norm scales and shifts, head
BUFFER = 120_000_000
needs_linux = pytest.mark.skipif(
    not process_memory.reset_peak(), reason="this system cannot tell the peak memory of a part of a run"
)


def trained(method: str | Method, **changes: Any) -> Result:
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    return pf.run(tiny_federation(), method, TinyNet(), **values)


def total(result: Result) -> Totals:
    experiment = result.experiment
    clients = len(experiment.federation.clients)
    return totals(experiment.costs, clients, experiment.settings.sampled(clients), experiment.server.round)


def cost(method: str) -> Spent:
    return MethodRow(method, [RunRecord.from_result(trained(method))]).spent


@pytest.mark.parametrize(
    ("method", "once", "a_round"),
    [
        ("fedavg", 0, 0),
        ("quantise", 0, 0),
        ("topk(share=0.1)", 0, 0),
        # Clients hold 13, 8 and 5 images and send the spectra of 6, 4 and 2.
        ("elcfs(share=0.5)", 12 * SPECTRUM / 3, 0),
        ("elcfs(share=0.5, aggregate=True)", SPECTRUM, 0),
        ("ccst", STYLE, 0),
        ('ccst(mode="single")', 26 * STYLE / 3, 0),
        # For each of two norms of 8 channels: mean, variance and their gradients, a number, and the layer's name three times.
        ("fedtan", 0, 2 * (4 * 8 * 4 + 8) + 3 * len("stem.1" + "branch.1")),
        ("feddg_ga", 0, 2 * 8),
        ("fednova", 0, 8),
        ("scaffold", 0, PARAMETERS * 4),
        ("ccst + scaffold", STYLE, PARAMETERS * 4),
    ],
)
def test_what_leaves_a_client_once_and_in_each_round(method: str, once: float, a_round: float) -> None:
    found = cost(method)
    assert (found.left_once, found.left_a_round) == (pytest.approx(once), a_round)


def test_extra_bytes_beside_fedavg_by_hand() -> None:
    reference = cost("fedavg")
    statistics = 2 * (2 * 8 * 4 + 8)  # running means and variances, and a counter, of two norms
    assert reference.traffic == 2 * (PARAMETERS * 4 + statistics)
    # Up: an instance side of 16 values and two scores more in each of two layers. Down: the batch side stays away (32 values, a
    # counter), the instance side and one score are sent.
    gperxan = 2 * (16 + 2) * 4 + 2 * ((16 + 1) * 4 - (32 * 4 + 8))
    # A control variate is uploaded in both rounds, and downloaded in the second.
    scaffold = (2 + 1) * PARAMETERS * 4 / 2
    # A style is uploaded and two other styles are downloaded, before two rounds.
    ccst = 3 * STYLE / 2
    for method, extra in {"gperxan": gperxan, "scaffold": scaffold, "ccst": ccst}.items():
        assert Expense(method, "", "", cost(method), reference).extra_traffic == extra, method


def test_sampled_clients_count_only_when_they_take_part() -> None:
    result = trained("feddg_ga", clients_per_round=2, rounds=3)
    found = total(result)
    assert (found.clients, found.rounds, found.client_rounds, found.left_in_rounds) == (3, 3, 6, 6 * 16)
    assert spent([found]).left_a_round == MethodRow("feddg_ga", [RunRecord.from_result(result)]).spent.left_a_round == 16


def test_granularities_of_joined_methods_the_finer_one_counts() -> None:
    assert parse("fedavg").facts.granularity == parse("quantise").facts.granularity == ""
    assert parse("ccst").facts.granularity == parse("elcfs(aggregate=True)").facts.granularity == "aggregate"
    assert (
        parse('ccst(mode="single")').facts.granularity
        == parse("elcfs").facts.granularity
        == parse("central").facts.granularity
        == "per sample"
    )
    assert parse("elcfs + scaffold").facts.granularity == parse("scaffold + elcfs").facts.granularity == "per sample"
    assert parse("ccst + scaffold").facts.granularity == "aggregate"
    assert Facts(data_derived_uploads="class means", granularity="aggregate").uploads_with_granularity == "class means (aggregate)"
    assert Facts().uploads_with_granularity == ""


def test_every_method_that_lets_something_leave_declares_its_granularity() -> None:
    from method_tables import own_methods

    for name in own_methods():
        facts = parse(name).facts
        assert bool(facts.data_derived_uploads) == bool(facts.granularity), name


def fill_memory() -> None:
    torch.ones(BUFFER // 4)


@needs_linux
def test_a_big_buffer_in_training_shows_in_the_peak_one_in_evaluation_does_not() -> None:
    def in_training(client: Client) -> None:
        fill_memory()

    def in_evaluation(server: Server) -> Exchange[None]:
        fill_memory()
        return
        yield

    plain = trained("fedavg")
    greedy = trained(Method("greedy", before_training=(in_training,)))
    late = trained(Method("late", before_evaluation=(in_evaluation,)), evaluate_every=1)
    peaks = [result.experiment.costs.memory["increase"] for result in (plain, greedy, late)]
    assert peaks[0] < 0.2 * BUFFER
    assert 0.9 * BUFFER < peaks[1] - peaks[0] < 1.2 * BUFFER
    assert abs(peaks[2] - peaks[0]) < 0.2 * BUFFER
    costs = greedy.experiment.costs
    assert costs.memory["peak"] > costs.memory["increase"]


def test_cpu_seconds_of_training_without_evaluations() -> None:
    import time

    def burn(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def in_training(client: Client) -> None:
        burn(0.05)

    def in_evaluation(server: Server) -> Exchange[None]:
        burn(0.3)
        return
        yield

    busy = Method("busy", before_training=(in_training,), before_evaluation=(in_evaluation,))
    result = trained(busy, evaluate_every=1)
    found = total(result)
    assert found.cpu_seconds is not None and 2 * 3 * 0.05 <= found.cpu_seconds < 2 * 3 * 0.05 + 2 * 0.3
    assert result.experiment.costs.seconds["training"] >= 2 * 3 * 0.05


def test_what_cannot_be_measured_is_left_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "CLEAR", tmp_path / "nowhere" / "clear_refs")
    found = total(trained("fedavg"))
    assert found.memory is None and found.cpu_seconds is not None
    monkeypatch.setattr(process_memory, "STATUS", tmp_path / "status")
    assert process_memory.resident_size() is None and process_memory.peak_size() is None
    costs = Costs()
    elsewhere = meter.Meter(workers=lambda: None)
    elsewhere.pause(costs)
    assert not costs.memory and not costs.cpu_seconds and set(costs.seconds) == {"training"}


def test_the_user_s_random_numbers_are_left_alone() -> None:
    meter.load_libraries.cache_clear()
    before = torch.get_rng_state()
    meter.Meter()
    assert torch.equal(before, torch.get_rng_state())


def test_costs_of_older_runs_can_be_read() -> None:
    def old(extra: dict[str, int]) -> Costs:
        up = {"training": {"weight": 600, **extra}}
        return Costs.from_numbers({"bytes": {"up": up, "down": {}}, "messages": {"training": 6}, "seconds": {"training": 1.0}})

    assert old({}).left_clients() == (0, 0)
    unknown = old({"extra": 48})
    assert unknown.left_clients() == (None, None)
    found = spent([totals(unknown, 3, 3, 2)])
    assert found == Spent(None, None, 108.0, None, None)
    assert Costs.from_numbers(unknown.numbers()).left_clients() == (None, None)
    meter.Meter().pause(unknown)
    assert unknown.seconds["training"] > 1.0 and not unknown.cpu_seconds
    row = Expense("x", "styles", "aggregate", found, found)
    assert cells(row) == ["?", "?", "aggregate", "+0.000", "?", "?"]


def test_a_resumed_run_keeps_what_was_counted(tmp_path: Path) -> None:
    whole = trained("ccst + scaffold", out=tmp_path / "run")
    again = Costs.from_numbers(whole.experiment.snapshot().notes["costs"])
    assert again.left_clients() == whole.experiment.costs.left_clients() == (3 * STYLE, 6 * PARAMETERS * 4)
    assert again.cpu_seconds == whole.experiment.costs.cpu_seconds and again.memory == whole.experiment.costs.memory


def test_costs_are_means_over_runs_and_differences_to_the_reference() -> None:
    runs = [Totals(4, 10, 20, 400, 2000, 60_000, 5.0, 3_000_000), Totals(4, 10, 20, 800, 4000, 20_000, 15.0, 5_000_000)]
    found = spent(runs)
    assert found == Spent(150.0, 150.0, 2000.0, 1.0, 4_000_000.0)
    row = Expense("x", "styles", "per sample", found, Spent(0.0, 0.0, 500.0, 0.8, 1_000_000.0))
    assert (row.extra_traffic, row.extra_cpu, row.cpu_ratio, row.extra_memory) == (1500, pytest.approx(0.2), 1.25, 3_000_000)
    assert cells(row) == ["150 B", "150 B", "per sample", "+0.002", "+0.20 (1.25x)", "+3"]
    assert spent([*runs, Totals(4, 0, 0, None, 0, 0, None, None)]).left_once is None


def test_pooled_data_are_not_counted_and_nothing_is_invented_without_a_reference() -> None:
    rows = [MethodRow(name, [RunRecord.from_result(trained(name))]) for name in ("central", "elcfs")]
    central, elcfs = expenses(rows)
    assert cells(central)[:4] == ["not counted", "not counted", "per sample", "?"]
    assert cost_json(central)["left_once_bytes_per_client"] is None and cost_json(central)["granularity"] == "per sample"
    assert cost_json(elcfs)["left_once_bytes_per_client"] == SPECTRUM and cost_json(elcfs)["left_bytes_per_client_and_round"] == 0
    assert cost_json(elcfs)["extra_bytes_per_client_and_round"] is cost_json(elcfs)["cpu_ratio"] is None
    silent = Expense("mine", "", "", Spent(0.0, 8.0))
    assert cells(silent)[2] == "not declared"


def test_report_sets_methods_beside_fedavg(tmp_path: Path) -> None:
    for name in ("fedavg", "ccst", "scaffold"):
        trained(name, out=tmp_path / name)
    page = render([tmp_path / "fedavg", tmp_path / "ccst", tmp_path / "scaffold"])
    seen = words(page)
    assert "Cost and privacy compared with fedavg" in seen and "fedavg itself: 0.007 MB per client and round" in seen
    rows = re.findall(r"<tr><th class=\"first\" scope=\"row\">([^<]*)</th>((?:<td class=\"n\">[^<]*</td>){6})</tr>", page)
    found = {label: re.findall(r">([^<]*)</td>", row) for label, row in rows}
    assert found["fedavg"][:4] == ["0 B", "0 B", "–", "+0.000"]
    assert found["ccst(style=&#34;pixel&#34;)"][:4] == ["24 B", "0 B", "aggregate", "+36 B"]
    assert found["scaffold"][:4] == ["0 B", "3,436 B", "aggregate", "+0.005"]
    assert "channel mean and std of its images, once (aggregate; 72 B in this run)." in seen
    assert "compared with fedavg" not in words(render([tmp_path / "ccst", tmp_path / "scaffold"]))


COST_KEYS = (
    "data_derived_uploads granularity left_once_bytes_per_client left_bytes_per_client_and_round bytes_per_client_and_round "
    "extra_bytes_per_client_and_round cpu_seconds_per_round extra_cpu_seconds_per_round cpu_ratio peak_memory_increase_bytes "
    "extra_peak_memory_bytes"
)


def test_compare_prints_the_table_where_fedavg_is_there(polyfed: Command, images: Path) -> None:
    asked = ("compare", images, "--methods", "fedavg; ccst; feddg_ga", *SHORT, "--json")
    ended = polyfed(*asked)
    assert ended.code == 0, ended.err
    assert "cost and privacy relative to fedavg" in ended.out and "CPU time and memory are noisy" in " ".join(ended.out.split())
    fedavg, ccst, feddg_ga = (row["costs"] for row in ended.json["methods"])
    assert set(fedavg) == set(ccst) == set(COST_KEYS.split()) and ended.json["costs_note"]
    assert (fedavg["extra_bytes_per_client_and_round"], fedavg["cpu_ratio"], fedavg["data_derived_uploads"]) == (0, 1, None)
    # Two clients: a style of three channels is uploaded, and the other one downloaded, before two rounds.
    assert (ccst["left_once_bytes_per_client"], ccst["extra_bytes_per_client_and_round"]) == (STYLE, 2 * STYLE / 2)
    assert (feddg_ga["left_bytes_per_client_and_round"], feddg_ga["granularity"]) == (16, "aggregate")
    if sys.platform == "linux" and process_memory.reset_peak():
        assert ccst["peak_memory_increase_bytes"] >= 0
    without = polyfed(*asked, "--no-costs")
    assert "beside fedavg" not in without.out and without.json["methods"][1]["costs"] == ccst
    alone = polyfed("compare", images, "--methods", "ccst", *SHORT, "--json")
    assert "beside fedavg" not in alone.out
    assert alone.json["methods"][0]["costs"]["left_once_bytes_per_client"] == STYLE
    assert alone.json["methods"][0]["costs"]["extra_bytes_per_client_and_round"] is None


def test_costs_without_fedavg_are_refused_before_training(polyfed: Command, images: Path) -> None:
    says(polyfed("compare", images, "--methods", "fedbn", "--costs"), "--costs", "fedavg", "fedavg; fedbn")
    assert not Path("runs").exists()


def test_show_says_what_leaves_and_its_granularity(polyfed: Command, images: Path) -> None:
    facts = polyfed("show", "elcfs", "--data", images, "--json").json["facts"]
    assert "amplitude spectra" in facts["data_derived_uploads"] and facts["granularity"] == "per sample"
    shown = " ".join(polyfed("show", "ccst", "--data", images).out.split())
    assert "granularity aggregate" in shown and "channel mean and std of its images, once" in shown
    assert polyfed("show", "fedavg", "--data", images, "--json").json["facts"]["granularity"] == "none"
