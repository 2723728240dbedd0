"""The report: its numbers come from the runs, its words say no more than they do, and nothing in a run can break the page."""

from __future__ import annotations

import html as html_text
import itertools
import json
import math
import re
import shlex
import statistics
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.report_page import words
from polyfed.cli.options import read_change
from polyfed.core.method import parse
from polyfed.errors import RunFolderError
from polyfed.runs.folder.checkpoint import Snapshot
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import Settings, with_changes
from polyfed.studies.report import charts, commands, gather, verdict
from polyfed.studies.report.html import render, write_report
from polyfed.studies.report.run_record import RunRecord

PLAN = [
    {"from_round": 1, "kind": "weight", "travels": "shared", "entries": 3, "bytes": 96960},
    {"from_round": 4, "kind": "norm_stat", "travels": "sent, not uploaded", "entries": 6, "bytes": 896},
]
BYTES = {
    "up": {"training": {"weight": 3_000_000, "head": 250_000}, "evaluation": {"extra": 1600}},
    "down": {"training": {"weight": 2_000_000}, "evaluation": {"weight": 500_000}, "newcomer": {"norm_stat": 40_000}},
}
COSTS = {"bytes": BYTES, "messages": {"training": 25, "evaluation": 10}, "seconds": {"training": 61.0, "evaluation": 2.0}}
Scores = Mapping[str, int]


def line(number: int, view: str, domain: str, right: int, count: int = 400) -> dict[str, Any]:
    client = domain if view == "seen" else "newcomer"
    place = {"round": number, "view": view, "client": client, "domain": domain}
    return {**place, "accuracy": right / count, "count": count, "right": right}


def make_run(
    path: Path,
    method: str = "fedavg",
    seen: Scores | None = None,
    newcomer_scores: Scores | None = None,
    curve: bool = True,
    reached: int | None = None,
    source: str = "hand-written",
    leaves: str = "",
    given: tuple[str, ...] = (),
    facts_of_method: Mapping[str, Any] | None = None,
    facts_of_data: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run folder without training: ``seen`` and ``newcomer_scores`` are right answers out of 400 in the last round."""
    values = {"rounds": 4, "method": method, **changes}
    settings = with_changes(Settings(), values)
    folder = RunFolder(path)
    facts = {
        "given_in_python": list(given),
        "method": {"text": method, "all_options": method, "data_derived_uploads": leaves, **(facts_of_method or {})},
        "data": {"name": settings.data, "source": source, "classes": 10, "clients": 2, **(facts_of_data or {})},
        "model": {"type": "SmallCNN", "parameters": 10},
        "plan": PLAN,
    }
    folder.create(settings, facts)
    last = settings.rounds if reached is None else reached
    lines: list[Mapping[str, Any]] = []
    for number in range(1, last + 1):
        lines += [{"round": number, "view": "training", "client": client, "loss": 2.0 / number} for client in ("a", "b")]
        if curve or number == last:
            lines += [line(number, "seen", d, right - 10 * (last - number)) for d, right in (seen or {}).items()]
            lines += [line(number, "unseen", d, right - 10 * (last - number)) for d, right in (newcomer_scores or {}).items()]
    folder.append(lines)
    notes = {"costs": COSTS, "metrics_size": folder.metrics_size(), "finished": reached is None}
    folder.checkpoints.write(Snapshot(last, {"w": torch.arange(3.0)}, notes=notes), set())
    return path


def row_cells(page: str, label: str) -> list[str]:
    """The cells of a method's first row in the table of accuracies."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL)
    row = next(row for row in rows if 'class="first" scope="row"' in row and html_text.escape(label) + "<small>" in row)
    return [words(cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL)]


def test_table_holds_means_and_deviations_over_seeds_worked_out_here(tmp_path: Path) -> None:
    scores = {("fedavg", 0): (200, 300), ("fedavg", 1): (220, 296), ("fedbn", 0): (260, 300), ("fedbn", 1): (272, 304)}
    runs = [make_run(tmp_path / f"{m}{s}", m, {"pen": p, "ink": i}, seed=s) for (m, s), (p, i) in scores.items()]
    page = render(runs)
    for method in ("fedavg", "fedbn"):
        many = [scores[method, seed] for seed in (0, 1)]
        columns = [
            [100 * p / 400 for p, _ in many],
            [100 * i / 400 for _, i in many],
            [100 * (p + i) / 800 for p, i in many],
            [100 * min(p, i) / 400 for p, i in many],
            [100 * abs(p - i) / 400 for p, i in many],
        ]
        assert row_cells(page, method) == [f"{statistics.mean(c):.1f} ± {statistics.stdev(c):.1f}" for c in columns]
    assert page.count('<td class="n best"') == 3 and page.count('<td class="n total best"') == 1  # fedbn: both domains, worst; mean
    assert words(page).count("2 seeds") >= 2
    assert "<b>66.5</b>" in page  # fedbn on pen: 266 of 400


def test_clear_winner_over_paired_seeds(tmp_path: Path) -> None:
    rights = {"fedavg": (200, 204, 198), "fedbn": (300, 306, 297)}
    runs = [make_run(tmp_path / f"{m}{s}", m, {"pen": r}, seed=s) for m, many in rights.items() for s, r in enumerate(many)]
    (group,) = gather.gather(runs)
    found = verdict.verdict_of(group, "seen")
    assert found is not None
    differences = [25.0, 25.5, 24.75]
    half = 4.303 * statistics.stdev(differences) / math.sqrt(3)
    mean = statistics.mean(differences)
    assert found.title == "fedbn wins: 75.2 % on pen, 25.1 points more than fedavg."
    assert f"{mean - half:+.1f} to {mean + half:+.1f}, which excludes zero" in " ".join(found.sentences)
    error = math.sqrt(0.7525 * 0.2475 / 400 + (602 / 1200) * (598 / 1200) / 400)
    assert found.differences[0].test_error == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(
    ("fedavg", "fedbn", "expected"),
    [
        ((200,), (206,), "No clear winner"),
        ((200,), (280,), "There is only one seed."),
        ((200,), (200,), "A tie"),
        ((200, 240), (250, 392), "No clear winner"),
    ],
)
def test_headline_never_claims_more_than_the_runs_show(
    tmp_path: Path, fedavg: tuple[int, ...], fedbn: tuple[int, ...], expected: str
) -> None:
    both = {"fedavg": fedavg, "fedbn": fedbn}
    runs = [make_run(tmp_path / f"{m}{s}", m, {"pen": r}, seed=s) for m, many in both.items() for s, r in enumerate(many)]
    seen = words(render(runs))
    assert expected in seen and "wins" not in seen
    within = abs(fedavg[0] - fedbn[0]) < 20
    assert ("is within the noise of the test sets" in seen) == within
    assert ("One seed does not show" in seen) == (len(fedavg) == 1)
    assert ("2 seeds are not enough to decide" in seen) == (len(fedavg) == 2)


def test_domains_won_and_tied_are_counted(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", "fedavg", {"pen": 300, "ink": 200, "oil": 100})
    two = make_run(tmp_path / "b", "fedbn", {"pen": 300, "ink": 290, "oil": 90})
    seen = words(render([one, two]))
    assert "fedbn is best on 1 of 3 domains (ink), and shares the best score on pen." in seen
    assert "By worst domain, fedavg ranks first with 25.0 %." in seen


def test_seen_and_unseen_are_kept_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / m, m, {"pen": p, "ink": 310}, {"oil": o}) for m, p, o in (("fedavg", 390, 50), ("fedbn", 200, 160))]
    page = render(runs)
    seen = words(page)
    assert "fedavg is ahead: 87.5 % on average over 2 domains the clients trained on" in seen
    assert "fedbn is ahead: 40.0 % on oil, a domain held out of training" in seen
    assert row_cells(page, "fedavg") == ["97.5 ± 0.8", "77.5 ± 2.1", "87.5 ± 1.1", "77.5 ± 2.1", "20.0"]


def test_curves_where_rounds_were_evaluated_and_bars_where_not(tmp_path: Path) -> None:
    curves = render([make_run(tmp_path / "a", seen={"pen": 300, "ink": 200})])
    assert curves.count("Accuracy over rounds, ") == 2 * 3  # aria-label and title; mean and two domains
    assert "fedavg, round 1: 67.5" in curves  # 300 - 30 of 400
    assert "fedavg, round 4: 0.5" in curves  # training loss 2 / 4
    assert "--evaluate-every 1</code> to record them" not in curves
    bars = render([make_run(tmp_path / "b", seen={"pen": 300}, curve=False)])
    assert "--evaluate-every 1</code> to record them" in bars
    assert f"fedavg: 75.0 % ± {100 * math.sqrt(0.75 * 0.25 / 400):.1f}" in bars

    second = make_run(tmp_path / "c", seen={"pen": 308, "ink": 200}, seed=1)
    assert 'class="band' not in curves and 'class="band' in render([tmp_path / "a", second])


def test_cost_by_class_and_purpose(tmp_path: Path) -> None:
    page = render([make_run(tmp_path / m, m.replace("-", " + "), {"pen": 300}) for m in ("fedavg", "fedbn", "fedprox-agc")])
    seen = words(page)
    assert "fedavg 3.25 MB 2.00 MB 25 61 s 502 kB 40.0 kB 10 2.0 s" in seen
    assert "training weights 3.00 MB 2.00 MB" in seen and "newcomer norm statistics 0 B 40.0 kB" in seen
    assert "weights: 3.00 MB" in page and "head: 250 kB" in page  # tooltips of the stacked bars
    assert "Mean accuracy by training traffic" in page
    assert "Score by traffic" not in words(render([tmp_path / "fedavg", tmp_path / "fedbn"]))


def test_plan_and_what_leaves_clients(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", seen={"pen": 300})
    two = make_run(tmp_path / "b", "my_own", {"pen": 300}, leaves="mean colours of images")
    seen = words(render([one, two]))
    assert (
        "norm statistics from round 4: sent, not uploaded 6 entries, 896 B" in seen and "weights shared 3 entries, 97.0 kB" in seen
    )
    assert "fedavg: Clients upload only model entries during training." in seen
    assert "my_own: Besides model entries, clients upload during training: mean colours of images." in seen


def test_command_gives_the_settings_back(tmp_path: Path) -> None:
    odd = {"lr": 0.01, "unseen": ("a b", "c"), "seed": 3, "clients_per_round": 0.5, "schedule": "steps(at=(0.5, 0.75), factor=0.1)"}
    run = RunRecord.from_folder(make_run(tmp_path / "a", "fedbn + agc(clip=1.28)", {"pen": 300}, **odd))
    given = shlex.split(commands.command(run))
    assert given[:3] == ["polyfed", "run", "digits-mini"]
    changes: dict[str, Any] = {}
    for option, value in zip(given[3::2], given[4::2], strict=True):
        name, read = read_change(f"{option.removeprefix('--')}={value}")
        changes[name] = changes.get(name, ()) + read if isinstance(read, tuple) else read
    assert with_changes(Settings(), changes) == RunFolder(tmp_path / "a").settings()
    assert "--batch-size" not in given
    page = words(render([tmp_path / "a"]))
    assert run.digest in page and "torch " + torch.__version__.split("+")[0] in page and commands.command(run) in page


def test_a_run_begun_in_python_has_no_command(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedbn", {"pen": 300}, given=("data", "model"), data="given data")
    page = words(render([tmp_path / "a"]))
    assert "polyfed run" not in page and "# fedbn, seed 0: started in Python with: data, model." in page


def test_a_command_spells_the_options_of_then_out(tmp_path: Path) -> None:
    today = parse("fedprox").full_text
    same = make_run(tmp_path / "same", "fedprox", {"pen": 300}, facts_of_method={"all_options": today})
    then = make_run(tmp_path / "then", "fedprox", {"pen": 300}, facts_of_method={"all_options": "fedprox(mu=0.123)"})
    assert "--method fedprox --" in commands.command(RunRecord.from_folder(same))
    assert "--method 'fedprox(mu=0.123)' --" in commands.command(RunRecord.from_folder(then))


def test_clients_of_a_domain_count_by_their_tests(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", "fedbn", {}, facts_of_data={"test_sizes": {"seen": {"pen": 500}}})
    RunFolder(path).append([line(4, "seen", "pen", 100, 100), line(4, "seen", "pen", 200, 400)])
    run = RunRecord.from_folder(path)
    assert run.tables_of("accuracy")["seen"][4]["pen"] == pytest.approx(300 / 500)
    assert run.test_sizes == {("seen", "pen"): 500}


def test_same_method_with_other_settings_is_not_averaged(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(lr), seen={"pen": right}, lr=lr) for lr, right in ((0.01, 200), (0.1, 300))]
    page = render(runs)
    assert f"400 images ± {100 * math.sqrt(0.625 * 0.375 / 400):.1f}" in words(page) and "Data: hand-written" in words(page)
    assert row_cells(page, "fedavg [lr=0.01]") == ["50.0 ± 2.5"] and row_cells(page, "fedavg [lr=0.1]") == ["75.0 ± 2.2"]


def test_unequal_settings_are_said_and_nobody_wins(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{m}{s}", m, {"pen": r + s}, seed=s, rounds=n)
        for s in (0, 1)
        for m, r, n in (("fedavg", 200, 4), ("fedbn", 300, 5))
    ]
    seen = words(render(runs))
    assert "Settings differ: rounds is 4 for fedavg and 5 for fedbn." in seen
    assert "Their settings differ." in seen and "wins" not in seen


def test_seeds_are_paired_by_number_and_repeats_left_out(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"avg{s}", "fedavg", {"pen": 200 + 40 * s}, seed=s) for s in (2, 1)]
    runs += [make_run(tmp_path / f"bn{s}", "fedbn", {"pen": 300 + 40 * s}, seed=s) for s in (1, 2)]
    runs.append(make_run(tmp_path / "again", "fedbn", {"pen": 8}, seed=2))
    (group,) = gather.gather(runs)
    found = verdict.verdict_of(group, "seen")
    assert found is not None and found.differences[0].by_seed == pytest.approx([0.25, 0.25])
    seen = words(render(runs))
    assert "repeats seed 2 of fedbn" in seen
    runs.append(make_run(tmp_path / "avg0", "fedavg", {"pen": 200}, seed=0))
    seen = words(render(runs))
    assert "Seeds differ: fedavg has 0, 1 and 2; fedbn has 1 and 2." in seen and "fedavg reaches 60.0 % on pen." in seen
    assert "fedbn † is not ranked, because it has no result for seed 0: no run. Its numbers are of seeds 1 and 2." in seen


def test_methods_that_pool_data_are_references_and_cannot_win(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / m, m, {"pen": r}) for m, r in (("fedavg", 200), ("fedbn", 280), ("central", 390))]
    runs.append(make_run(tmp_path / "mine", "my_own", {"pen": 380}, facts_of_method={"pools_data": True}))
    seen = words(render(runs))
    assert "fedbn is ahead: 70.0 % on pen, 20.0 points more than fedavg" in seen
    assert "central trains on the pooled data. It is a reference, not a federated method: 97.5 %." in seen
    assert "my_own trains on the pooled data." in seen


def test_unfinished_run_says_how_far_it_came(tmp_path: Path) -> None:
    half = make_run(tmp_path / "half way", "fedbn", {"pen": 390}, reached=2)
    done = make_run(tmp_path / "done", "fedavg", {"pen": 200})
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "view": "see')  # killed while writing
    page = render([half, done])
    seen = words(page)
    assert "Unfinished: fedbn, seed 0, stopped after round 2 of 4." in seen and f"polyfed resume '{half}'" in seen
    assert "fedavg reaches 50.0 % on pen." in seen
    assert row_cells(page, "fedbn †") == ["97.5"] and "unfinished: round 2 of 4, scores of round 2" in seen
    assert "No finished run has scores" in words(render([half]))

    RunFolder(tmp_path / "new").create(Settings(), {})
    seen = words(render([tmp_path / "new"]))
    assert "These runs have no scores yet." in seen and "stopped after round 0 of 20" in seen


def test_runs_on_other_data_are_grouped_apart(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", "fedavg", {"pen": 200})
    two = make_run(tmp_path / "b", "fedbn", {"pen": 390}, unseen_part="all")
    three = make_run(tmp_path / "c", "fedbn", {"pen": 390}, source="another version")
    seen = words(render([one, two, three]))
    assert "These runs use 3 different data sets or partitions." in seen
    assert "points more" not in seen and "no other method to compare it with" in seen


def test_errors_name_every_folder_that_is_no_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", seen={"pen": 200})
    with pytest.raises(RunFolderError, match=r"needs at least one run folder"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunFolderError, match=r"nowhere is not a run.*runs is not a run.*It contains run folders: one"):
        write_report([tmp_path / "nowhere", tmp_path / "runs", run], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(RunFolderError, match="Cannot write the report"):
        write_report([run], tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "[]", *lines[1:]]) + "\n")
    with pytest.raises(RunFolderError, match="line 2 is not a valid metrics line"):
        write_report([run], tmp_path / "r.html")


def test_damaged_checkpoint_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", seen={"pen": 200})
    (run / "checkpoint" / "server-000004.safetensors").write_bytes(b"x")
    with pytest.raises(RunFolderError, match=r"is damaged .* has no good checkpoint\..*--allow-unfinished"):
        render([run])
    seen = words(render([run], allow_unfinished=True))
    assert "server-000004.safetensors is damaged" in seen and "no readable checkpoint" in seen


EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Tags(HTMLParser):
    """Collects tags and what they would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def evil_runs(folder: Path) -> list[Path]:
    seen = {f"pen{EVIL}": 300, "see https://example.org/x": 200}
    return [
        make_run(folder / f"{i}{curve}", f"m{i}{EVIL}", seen, {EVIL: 9}, curve=curve, seed=i, source=EVIL, leaves=EVIL, loss=EVIL)
        for i in range(3)
        for curve in (True,)
    ] + [make_run(folder / "bars", f"bars{EVIL}", seen, curve=False, source="other", head=EVIL)]


def test_nothing_in_a_run_becomes_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = render(evil_runs(tmp_path))
    found = Tags()
    found.feed(page)
    assert not found.tags & {"img", "link", "iframe", "object", "embed", "base", "form"}
    assert found.scripts == 3 and page.count("<script") == 3  # the curves, uPlot, and the page's own
    assert found.loads == [] and found.handlers == []
    assert "@import" not in page and "url(" not in page
    assert "alert(1)" in words(page)  # shown, as text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and policy[1].count("'sha256-") == 2
    assert "script-src 'unsafe-inline'" not in policy[1]
    curves = re.search(r'<script type="application/json" id="curves">(.*?)</script>', page, flags=re.DOTALL)
    assert curves is not None and "<" not in curves[1]
    assert any(EVIL in label for group in json.loads(curves[1]) for label in group["labels"])


def test_report_is_one_file_written_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", seen={"pen": 300})
    path = write_report([run, str(run)], tmp_path / "deep" / "report.html")
    assert path == tmp_path / "deep" / "report.html" and [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert path.read_text() == render([run], path)
    assert "prefers-color-scheme: dark" in path.read_text() and "@media print" in path.read_text()


@pytest.mark.parametrize(("low", "high"), [(0.12, 0.93), (0, 1), (3, 3), (0, 0), (-2.5, 7), (1e-7, 3e-7), (0, 123456789)])
def test_ticks_are_round_and_cover(low: float, high: float) -> None:
    found = charts.ticks(low, high)
    steps = {f"{b - a:.6e}" for a, b in itertools.pairwise(found)}
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 9 and len(steps) == 1
    mantissa = f"{found[1] - found[0]:.3e}".split("e")[0]
    assert low == high or float(mantissa) in (1, 2, 2.5, 5)


def test_whole_ticks_for_rounds() -> None:
    assert charts.ticks(1, 4, whole=True) == [1, 2, 3, 4]
    assert all(tick == int(tick) for last in range(1, 200) for tick in charts.ticks(1, last, whole=True))


def test_names_in_a_scatter_do_not_overlap() -> None:
    dots = [charts.Dot(f"method number {i}", i, 100.0, 0.5) for i in range(6)]
    svg = charts.scatter(dots, "t", (str, str), ("x", "y"))
    places = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="end" class="label"', svg)]
    assert len(places) == 6 and min(b - a for a, b in itertools.pairwise(places)) >= 12


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", seen={"pen": 300})
    RunFolder(run).append([{"round": 4, "view": "training", "client": "c", "loss": math.nan}])
    assert math.isnan(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"])
    drawn = re.findall(r"<svg.*?</svg>", render([run]), flags=re.DOTALL)
    assert any("Training loss" in svg for svg in drawn) and not any("nan" in svg for svg in drawn)


def browse(chromium: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
    base = [str(chromium), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *quiet, f"--user-data-dir={profile}"]
    return subprocess.run([*base, *options], capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.chromium
def test_page_renders_in_a_browser(tmp_path: Path, chromium: Path) -> None:
    from PIL import Image

    page = write_report(evil_runs(tmp_path / "runs"), tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    logged = browse(
        chromium, tmp_path / "p", "--enable-logging=stderr", f"--screenshot={shot}", "--window-size=900,1400", page.as_uri()
    )
    assert "CONSOLE" not in logged.stderr, logged.stderr  # a refused script or style would be logged there
    with Image.open(shot) as picture:
        assert picture.size == (900, 1400)
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24) or []) > 50
    dom = browse(chromium, tmp_path / "p", "--dump-dom", page.as_uri()).stdout
    # Runs scored in one round have no curves.
    assert dom.count("<svg") == page.read_text().count("<svg") and dom.count("<canvas") == 1


def test_how_often_it_was_scored_matters_where_validation_chose_the_round(tmp_path: Path) -> None:
    def labels(name: str, selection: str, *every: int) -> list[str]:
        runs = [
            make_run(tmp_path / name / str(seed), seen={"pen": 300}, seed=seed, selection=selection, evaluate_every=rounds)
            for seed, rounds in enumerate(every)
        ]
        (group,) = gather.gather(runs)
        return [one.method for one in group.rows]

    assert labels("last", "last", 0, 10) == ["fedavg"]
    assert labels("same", "best_validation", 0, 1) == ["fedavg"]
    chosen = "fedavg [selection=best_validation of every"
    assert labels("other", "best_validation", 0, 10) == [f"{chosen} round]", f"{chosen} 10 rounds]"]


def test_runs_of_one_text_whose_options_differ_are_two_entries(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, "fedavg", {"pen": right}) for name, right in (("old", 200), ("new", 240))]
    written = folders[0] / "run.toml"
    written.write_text(written.read_text().replace('all_options = "fedavg"', 'all_options = "fedavg(statistics=\\"local\\")"'))
    (group,) = gather.gather(folders)
    assert sorted(one.method for one in group.rows) == ["fedavg", 'fedavg(statistics="local")']


def test_a_search_is_reported_with_what_it_tried(tmp_path: Path) -> None:
    from polyfed.studies.report.html import report_on

    make_run(tmp_path / "sweep" / "final" / "fedavg-seed0", seen={"pen": 300}, lr=0.1)
    trials = [{"values": {"lr": lr}, "validation": v, "run": f"trials/{lr}"} for lr, v in ((0.01, 0.5), (0.1, 0.625), (1.0, None))]
    method = {"method": "fedavg", "trials": trials, "chosen": trials[1]}
    document = {"search": "grid", "searched": {"lr": [0.01, 0.1, 1.0]}, "chosen_by": "mean of validation", "methods": [method]}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(document))
    page = words(report_on(tmp_path / "sweep", tmp_path / "r.html").read_text())
    assert (
        "Hyperparameter search Grid search in" in page
        and "Values were selected by the mean of validation. The search did not use any test set." in page
    )
    assert "fedavg 0.1 62.5 chosen fedavg 0.01 50.0 fedavg 1.0 failed" in page and "fedavg reaches 75.0 % on pen." in page
    (tmp_path / "sweep" / "sweep.json").write_text("[]")
    with pytest.raises(RunFolderError, match=r"sweep.json is not a valid search"):
        report_on(tmp_path / "sweep", tmp_path / "r.html")
