"""``polyfed audit``: look after audit logs, and measure what a run or a gradient gives away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from polyfed.cli.help import Group
from polyfed.cli.options import REOPENED, argument, example_text, shared
from polyfed.cli.output import listen, print_json, print_line, say, status, warn
from polyfed.cli.tables import emit, print_table


@click.group("audit", cls=Group)
def audit() -> None:
    """Audit logs of servers and nodes; leakage of runs."""


@audit.command("verify", epilog=example_text("polyfed audit verify node-1/audit.jsonl"))
@argument("file", "FILE", "audit.jsonl of a server or node.")
@click.option("--expect", metavar="HASH", default="", help="A last hash that was noted before; it must still be in the chain.")
def verify(file: str, expect: str) -> None:
    """Follow the chain of hashes; a line that was changed, added or taken out is named, with exit code 2."""
    from polyfed.runs.folder.audit_log import verify as verified

    found = verified(Path(file), expect)
    print(f"{found.lines} lines, unbroken. Note the last hash elsewhere: {found.last}")


@audit.command("spent", epilog=example_text("polyfed audit spent node-1/privacy.jsonl"))
@argument("file", "FILE", "privacy.jsonl of a node.")
@click.option("--delta", type=float, default=1e-5, help="At which epsilon is stated.")
@shared("json")
def spent(file: str, delta: float, as_json: bool) -> None:
    """Show what a node has spent of its privacy, by its own account: by run, and in all."""
    from polyfed.flower.node.account import account_in

    found = account_in(Path(file), delta)
    runs = [{"run": run[:12], **each} for run, each in found["runs"].items()]
    emit(
        [*runs, {"run": "in all", **found, "first": "", "last": ""}],
        {
            "run": "run",
            "trainings": "trainings",
            "epsilon": lambda row: f"{row['epsilon']:.4g}",
            "first": lambda row: row["first"][:16],
            "last": lambda row: row["last"][:16],
        },
        found if as_json else None,
        f"spent at delta = {delta:g}; protects {found['protects']}",
        numbers=("trainings", "epsilon"),
    )


@audit.command("leakage", epilog=example_text("polyfed audit leakage runs/digits-mini-fedwon-seed0 --shadows 4"))
@shared("run")
@click.option(
    "--shadows", type=int, default=0, help="Shadow runs for the likelihood attack, in pairs; each costs as much as the run."
)
@click.option(
    "--max-examples", "maximum", type=int, default=1000, help="Members, and others, of each client that are attacked at most."
)
@click.option("--root", metavar="DIR", help="Folder of the run's data, if they moved.")
@shared(*REOPENED, "json", "quiet")
def leakage(path: str, shadows: int, maximum: int, as_json: bool, quiet: bool, **how: Any) -> None:
    """Say which samples a run was trained on, by its models; how often that is right is a lower bound of what it gives away."""
    listen(quiet)
    with status("Opening the run", quiet):
        from polyfed.runs.folder.paths import Reopening
        from polyfed.runs.reopen import open_experiment
        from polyfed.studies.analyse.leakage import membership

        experiment = open_experiment(path, Reopening(notify=warn, **how), own_data=True)
    told = membership(experiment, shadows, maximum, notify=(lambda text: None) if quiet else say)
    found = {"run": str(path), "method": str(experiment.method), **told}
    if not quiet:
        _print_leakage(found)
    if as_json:
        print_json(found)


def _print_leakage(found: dict[str, Any]) -> None:
    """Print both attacks by client, by domain and in all."""
    attacks = [name for name in ("loss", "lira") if name in found["all"]]
    heads = [f"{name}: {what}" for name in attacks for what in ("AUC", "TPR at 1 % FPR")]
    rows = [("client", name, each) for name, each in found["clients"].items()]
    rows += [("domain", name, each) for name, each in found["domains"].items()] + [("all", "", found["all"])]
    shown = []
    for of, name, each in rows:
        pairs = ((f"{each[attack]['auc']:.3f}", f"{100 * each[attack]['tpr_at_1_percent_fpr']:.1f} %") for attack in attacks)
        shown.append((of, name, str(each["members"]), *(cell for pair in pairs for cell in pair)))
    title = f"membership inference on {found['method']} (lower bounds; chance is 0.500 and 1.0 %)"
    print_table(title, ("of", "name", "members", *heads), shown, numbers=("members", *heads))


@audit.command("inversion", epilog=example_text("polyfed audit inversion digits-mini --images 2 -o inversion.png"))
@argument("data", "DATA", "Data set, or a folder root/<domain>/<class>/*.")
@click.option(
    "--methods",
    default="fedavg; fedavg + group_norm; fedwon",
    help="Methods whose first gradient is inverted, separated by semicolons.",
)
@click.option("--images", type=click.IntRange(min=1), default=2, help="Images in the batch.")
@click.option("--steps", type=click.IntRange(min=1), default=300, help="Steps of the search.")
@click.option("--root", metavar="DIR", help="Folder that holds the data set's files.")
@click.option("--model", help="Model; default: the data set's own.")
@click.option("--seed", type=int, default=0, help="Seed of everything random.")
@click.option("--out", "-o", metavar="FILE", default="inversion.png", help="Picture with the images and what was found.")
@shared("json", "quiet")
def inversion(
    data: str,
    methods: str,
    images: int,
    steps: int,
    root: str | None,
    model: str | None,
    seed: int,
    out: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make images from the first gradient of a client, for several methods; a lower bound of what a gradient gives away."""
    listen(quiet)
    with status("Inverting gradients", quiet):
        from polyfed.settings import Settings
        from polyfed.studies.analyse.gradient_inversion import draw, invert

        settings = Settings(data=data, root=root, model=model, seed=seed, batch_size=max(images, 2)).trusted()
        found = invert(settings, [text.strip() for text in methods.split(";") if text.strip()], images, steps)
        draw(found, Path(out))
    rows = [{name: value for name, value in each.items() if name not in ("original", "found", "pixels")} for each in found]
    if not quiet:
        columns = ("method", "PSNR, dB", "cosine distance")
        cells = [(row["method"], f"{row['psnr']:.2f}", f"{row['cosine_distance']:.4f}") for row in rows]
        title = f"images found from one gradient of {images} (lower bounds; higher PSNR: nearer to the original)"
        print_table(title, columns, cells, numbers=columns[1:])
        print_line(f"picture: {out}")
    if as_json:
        print_json({"inversion": rows, "picture": out, "lower_bounds": True})
