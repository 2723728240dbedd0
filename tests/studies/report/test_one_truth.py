"""Terminal, report, LaTeX, Markdown, CSV, JSON and Python show the same rows, numbers, marks and verdict for the same runs."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path

import pytest

import polyfed as library
from helpers.command_line import SHORT, Command
from helpers.report_page import words

CRASHER = '''
from polyfed import Method, register

def stop(step):
    """Fail in round 2 with seed 1."""
    if step.client.round == 2 and step.client.bench.settings.seed == 1:
        raise RuntimeError("out of luck")

@register
def crasher() -> Method:
    """Crash."""
    return Method("crasher", gradients=(stop,), standalone=False)
'''
DATA, MODEL = "digits-mini(per_domain=20)", "small_cnn(width=4)"
T_OF_ONE = 12.7062
"""Quantile 0.975 of Student's t with one degree of freedom."""


def finals(run: Path) -> dict[str, float]:
    """The accuracies in the metrics of a run, with their mean and minimum."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["domain"]: line["accuracy"] for line in lines if line["view"] == "seen"}
    return found | {"mean": statistics.mean(found.values()), "worst": min(found.values())}


def expected(folder: Path, prefix: str) -> dict[str, str]:
    """The cells of a method, computed from its finished runs."""
    runs = [finals(run) for run in sorted(folder.glob(f"{prefix}-seed*")) if (run / "answers.safetensors").exists()]
    cells = {}
    for name in runs[0]:
        values = [100 * run[name] for run in runs]
        cells[name] = f"{statistics.mean(values):.1f}" + (f" ±{statistics.stdev(values):.1f}" if len(values) > 1 else "")
    return cells


def rows_of(lines: list[list[str]]) -> dict[str, list[str]]:
    return {cells[0].split(" with ")[0] + " †" * ("†" in cells[0] and " with " in cells[0]): cells[1:5] for cells in lines}


def of_terminal(out: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    head = next(number for number, cells in enumerate(lines) if cells[0] == "method")
    return rows_of([cells for cells in lines[head + 2 : head + 5] if len(cells) >= 5])


def of_report(page: str) -> dict[str, list[str]]:
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL):
        if label := re.search(r'class="first" scope="row">(fed.*?)<small>', row):
            cells = [words(cell).strip().replace("± ", "±") for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL)]
            found.setdefault(words(label[1]).strip(), cells[:4])
    return found


def of_latex(text: str) -> dict[str, list[str]]:
    plain = re.sub(r"\\textbf\{([^}]*)\}", r"\1", text)
    plain = re.sub(r" \{\\footnotesize\$\\pm\$([^}]*)\}", r" ±\1", plain).replace("$\\dagger$", "†")
    return rows_of([line.removesuffix(" \\\\").split(" & ") for line in plain.splitlines() if line.startswith("fed")])


def of_markdown(text: str) -> dict[str, list[str]]:
    plain = text.replace("**", "").replace("± ", "±")
    return rows_of([line.strip("| ").split(" | ") for line in plain.splitlines() if line.startswith("| fed")])


@pytest.fixture
def crashed(polyfed: Command, images: Path, tmp_path: Path) -> tuple[Path, tuple[str | Path, ...]]:
    """A comparison whose best method fails with one of two seeds; the others hardly learn."""
    (tmp_path / "crash.py").write_text(CRASHER)
    methods = "fedavg + crasher; fedavg with lr=0.00001; fedbn with lr=0.00001"
    command = ("compare", images, "--methods", methods, "--load", "crash.py", *SHORT, "--seeds", "2", "--out", "both")
    return tmp_path / "both", command


def test_a_method_that_failed_with_one_seed_is_marked_and_last_everywhere(
    polyfed: Command, crashed: tuple[Path, tuple[str | Path, ...]]
) -> None:
    folder, command = crashed
    ended = polyfed(*command, "--explain", "--json")
    assert ended.code == 2
    for form, name in (("latex", "t.tex"), ("md", "t.md"), ("csv", "t.csv"), ("json", "t.json")):
        assert polyfed("report", folder, "--tables", form, "-o", name, "--allow-unfinished").code == 0
    assert polyfed("report", folder, "-o", "r.html").code == 0
    page, latex, markdown = (Path(name).read_text() for name in ("r.html", "t.tex", "t.md"))

    best = finals(folder / "fedavg-crasher-seed0")
    others = [expected(folder, "fedavg-with-lr-1e-05"), expected(folder, "fedbn-with-lr-1e-05")]
    assert all(100 * best["mean"] > float(one["mean"].split(" ")[0]) for one in others)
    cells = {"fedavg": others[0], "fedbn": others[1], "fedavg + crasher †": expected(folder, "fedavg-crasher")}
    wanted = {label: [one["day"], one["night"], one["mean"], one["worst"]] for label, one in cells.items()}
    for shown in (of_terminal(ended.out), of_report(page), of_latex(latex), of_markdown(markdown)):
        assert shown == wanted and list(shown)[-1] == "fedavg + crasher †"
    assert not [line for line in latex.splitlines() if "crasher" in line and "textbf" in line]
    assert not [line for line in markdown.splitlines() if line.startswith("| fedavg + crasher") and "**" in line]

    reason = "is not ranked, because it has no result for seed 1: "
    told = (
        ended.out,
        ended.json["significance"],
        words(page),
        latex,
        markdown,
        Path("t.csv").read_text(),
        Path("t.json").read_text(),
    )
    assert all("crasher" in text and reason in " ".join(text.split()) for text in told)
    (row,) = (row for row in ended.json["methods"] if row["method"] == "fedavg + crasher")
    assert "out of luck" in row["missing"]["1"] and row["headline"]["mean"]["values"] == [pytest.approx(best["mean"])]
    records = list(csv.DictReader(io.StringIO(Path("t.csv").read_text())))
    assert {one["best"] for one in records if one["method"] == "fedavg + crasher"} == {"False"}
    title = ended.json["verdicts"][0]["title"]
    assert not title.startswith("fedavg + crasher") and title in " ".join(ended.out.split())
    assert title.replace(" with lr=1e-05", "") in words(page)


def shown_in(text: str) -> str:
    return text.replace("−", "-")


def test_the_interval_over_seeds_is_the_same_everywhere(polyfed: Command, tmp_path: Path) -> None:
    command = ("compare", DATA, "--methods", "fedavg; fedbn", "--model", MODEL, "--rounds", "1", "--seeds", "2", "--out", "c")
    ended = polyfed(*command, "--json")
    brief = " ".join(ended.out.split())
    explained = " ".join(polyfed(*command, "--explain").out.split())
    for form, name in (("latex", "t.tex"), ("csv", "t.csv"), ("json", "t.json")):
        polyfed("report", "c", "--tables", form, "-o", name)
    polyfed("report", "c", "-o", "r.html")
    found = library.compare(DATA, "fedavg; fedbn", MODEL, rounds=1, seeds=2, out="c")

    means = {method: [finals(Path("c") / f"{method}-seed{seed}")["mean"] for seed in (0, 1)] for method in ("fedavg", "fedbn")}
    first, second = sorted(means, key=lambda method: -statistics.mean(means[method]))
    differences = [one - other for one, other in zip(means[first], means[second], strict=True)]
    half = T_OF_ONE * statistics.stdev(differences) / 2**0.5
    low, high = statistics.mean(differences) - half, statistics.mean(differences) + half
    interval = f"{100 * low:+.1f} to {100 * high:+.1f}"
    assert found.best().method == first and found.lead == pytest.approx((low, high), abs=1e-4)
    assert f"Best minus second best: {interval} points (95 % interval over 2 seeds)" in shown_in(brief)
    page = shown_in(words(Path("r.html").read_text()))
    for text in (explained, page, found.significance, ended.json["significance"], Path("t.tex").read_text()):
        assert f"its 95 % interval is {interval}" in shown_in(text)
    assert found.significance == ended.json["significance"] and found.significance in explained
    title, *sentences = (found.verdicts[0].title, *found.verdicts[0].sentences)
    assert all(shown_in(sentence) in page for sentence in (title, *sentences))
    (pair,) = ended.json["verdicts"][0]["differences"]
    (exported,) = json.loads(Path("t.json").read_text())["verdicts"]
    assert pair["interval"] == pytest.approx([low, high], abs=1e-4) and pair["interval_over"] == "seeds"
    assert exported["title"] == title and exported["differences"] == [pair] and pair["verdict"] in brief
    rows = [
        row
        for row in csv.DictReader(io.StringIO(Path("t.csv").read_text()))
        if row["method"] == second and row["measure"] == "accuracy"
    ]
    assert {row["verdict"] for row in rows} == {pair["verdict"]} and float(rows[0]["interval_low"]) == pytest.approx(low, abs=1e-4)


def test_one_seed_is_called_one_seed_everywhere(polyfed: Command) -> None:
    command = ("compare", DATA, "--methods", "fedavg; fedbn", "--model", MODEL, "--rounds", "1", "--out", "c")
    ended = polyfed(*command, "--json")
    polyfed("report", "c", "-o", "r.html")
    assert "(95 % interval over test images)" in " ".join(ended.out.split()) and "; one seed." in " ".join(ended.out.split())
    for text in (ended.json["significance"], words(Path("r.html").read_text())):
        assert "One seed does not show how much the result varies between seeds" in text and "test images, one seed" in text


def test_rates_that_validation_chose_draw_no_caveat_and_others_do(polyfed: Command, images: Path) -> None:
    short = ("--rounds", "2", "--batch-size", "8", "--out")
    for method, rate in (("fedavg", "0.02"), ("fedbn", "0.05")):
        ended = polyfed("sweep", images, "--methods", method, "--lr", f"{rate},0.0000001", *short, method)
        assert ended.code == 0, ended.err
    assert polyfed("compare", images, "--methods", "fedavg with lr=0.02; fedbn with lr=0.05", *short, "given").code == 0
    assert polyfed("compare", images, "--methods", "fedavg; fedbn", "--lr", "0.05", *short, "same").code == 0
    pages = {}
    for name, folders in {"tuned": ("fedavg", "fedbn"), "given": ("given",), "same": ("same",)}.items():
        assert polyfed("report", *folders, "-o", "r.html").code == 0
        pages[name] = words(Path("r.html").read_text())
    assert (
        "Chosen on validation data: lr 0.0" in pages["tuned"]
        and "0.02 for fedavg" in pages["tuned"]
        and "0.05 for fedbn" in pages["tuned"]
    )
    assert (
        "Settings differ:" not in pages["tuned"]
        and "Their settings differ" not in pages["tuned"]
        and "differ in lr" not in pages["tuned"]
    )
    assert "The two runs differ in lr, so this does not compare the methods alone." in pages["given"]
    assert "All methods use lr 0.05, which was not tuned per method." in pages["same"]
    assert "not tuned per method" not in pages["tuned"] + pages["given"]


def test_sweep_names_its_metric_and_reports_the_edge_of_two_values(polyfed: Command, images: Path) -> None:
    values = ("--lr", "0.05,0.0000001", "--metric", "balanced_accuracy")
    ended = polyfed("sweep", images, "--methods", "fedavg; fedbn", *values, *SHORT[:4], "--json")
    assert ended.json["metric"] == "balanced_accuracy" and "chosen by balanced accuracy" in " ".join(ended.out.split())
    assert [one["at_the_edge"] for one in ended.json["methods"]] == [["lr"], ["lr"]]
    assert ended.out.count("the best lr is at the edge of the search range") == 2
    assert ended.json["significance"] and "Best minus second best" in ended.out


def test_the_worst_calibration_error_is_the_largest() -> None:
    found = library.run(DATA, "fedavg", MODEL, rounds=1).table("calibration_error")
    assert found["worst"] == max(found["seen"].values()) > min(found["seen"].values())
