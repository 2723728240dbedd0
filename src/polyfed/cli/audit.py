"""``polyfed audit``: audit logs, and the privacy leakage of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from polyfed.cli.help import Group
from polyfed.cli.options import REOPEN_OPTIONS, argument, example_text, shared
from polyfed.cli.output import log_to_stderr, print_json, print_line, print_text, status, warn
from polyfed.cli.tables import emit, print_table


@click.group("audit", cls=Group)
def audit() -> None:
    """Verify audit logs; measure privacy leakage."""


@audit.command("verify", epilog=example_text("polyfed audit verify node-1/audit.jsonl"))
@argument("file", "FILE", "The audit.jsonl file of a server or node.")
@click.option("--expect", metavar="HASH", default="", help="Earlier hash that the chain must still contain.")
def verify(file: str, expect: str) -> None:
    """Verify the hash chain of an audit log.

    Exits with code 2 and names the line if one was changed, added or removed.
    """
    from polyfed.runs.folder.audit_log import verify as verified

    found = verified(Path(file), expect)
    print(f"The chain of {found.lines} lines is intact. Keep its last hash in another place: {found.last}")


@audit.command("spent", epilog=example_text("polyfed audit spent node-1/privacy.jsonl"))
@argument("file", "FILE", "The privacy.jsonl file of a node.")
@click.option("--delta", type=float, default=1e-5, help="Delta at which epsilon is computed.")
@shared("json")
def spent(file: str, delta: float, as_json: bool) -> None:
    """Show the privacy budget that a node has spent, per run and in total."""
    from polyfed.flower.node.account import account_in

    found = account_in(Path(file), delta)
    runs = [{"run": run[:12], **each} for run, each in found["runs"].items()]
    emit(
        [*runs, {"run": "total", **found, "first": "", "last": ""}],
        {
            "run": "run",
            "trainings": "trainings",
            "epsilon": lambda row: f"{row['epsilon']:.4g}",
            "first": lambda row: row["first"][:16],
            "last": lambda row: row["last"][:16],
        },
        found if as_json else None,
        f"privacy budget spent at delta = {delta:g}, for {found['protects']}",
        numbers=("trainings", "epsilon"),
    )


@audit.command("leakage", epilog=example_text("polyfed audit leakage runs/digits-mini-fedwon-seed0 --shadows 4"))
@shared("run")
@click.option(
    "--shadows",
    type=int,
    default=0,
    help="Number of shadow runs (even) for the likelihood-ratio attack; each costs as much as the run.",
)
@click.option("--max-examples", "maximum", type=int, default=1000, help="Maximum number of members and of non-members per client.")
@click.option("--root", metavar="DIR", help="Data folder, if it has moved.")
@shared(*REOPEN_OPTIONS, "json", "quiet")
def leakage(path: str, shadows: int, maximum: int, as_json: bool, quiet: bool, **how: Any) -> None:
    """Run membership inference attacks on a run. Their success rate is a lower bound on its leakage."""
    log_to_stderr(quiet)
    with status("Opening the run", quiet):
        from polyfed.runs.folder.paths import Reopening
        from polyfed.runs.reopen import open_experiment
        from polyfed.studies.analyse.leakage import membership

        experiment = open_experiment(path, Reopening(notify=warn, **how), own_data=True)
    attacks = membership(experiment, shadows, maximum, notify=(lambda text: None) if quiet else print_text)
    found = {"run": str(path), "method": str(experiment.method), **attacks}
    if not quiet:
        _print_leakage(found)
    if as_json:
        print_json(found)


def _print_leakage(found: dict[str, Any]) -> None:
    """Print the success of both attacks per client, per domain and in total."""
    attacks = [name for name in ("loss", "lira") if name in found["all"]]
    columns = [f"{name}: {metric}" for name in attacks for metric in ("AUC", "TPR at 1 % FPR")]
    rows = [("client", name, each) for name, each in found["clients"].items()]
    rows += [("domain", name, each) for name, each in found["domains"].items()] + [("all", "", found["all"])]
    shown = []
    for level, name, each in rows:
        pairs = ((f"{each[attack]['auc']:.3f}", f"{100 * each[attack]['tpr_at_1_percent_fpr']:.1f} %") for attack in attacks)
        shown.append((level, name, str(each["members"]), *(cell for pair in pairs for cell in pair)))
    title = f"membership inference on {found['method']} (lower bounds; chance is 0.500 and 1.0 %)"
    print_table(title, ("level", "name", "members", *columns), shown, numbers=("members", *columns))


@audit.command("inversion", epilog=example_text("polyfed audit inversion digits-mini --images 2 -o inversion.png"))
@argument("data", "DATA", "Data set name, or image folder root/<domain>/<class>/*.")
@click.option("--methods", default="fedavg; fedavg + group_norm; fedwon", help="Methods to attack, separated by semicolons.")
@click.option("--images", type=click.IntRange(min=1), default=2, help="Number of images in the batch.")
@click.option("--steps", type=click.IntRange(min=1), default=300, help="Number of optimization steps.")
@click.option("--root", metavar="DIR", help="Folder with the data set files.")
@click.option("--model", help="Model. Default: the default model of the data set.")
@click.option("--seed", type=int, default=0, help="Random seed.")
@click.option(
    "--out", "-o", metavar="FILE", default="inversion.png", help="Figure to write, with the original and the reconstructed images."
)
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
    """Reconstruct images from a client's first gradient, for several methods. Gives a lower bound on the leakage."""
    log_to_stderr(quiet)
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
        title = f"images reconstructed from one gradient of {images} (lower bounds; a higher PSNR is closer to the original)"
        print_table(title, columns, cells, numbers=columns[1:])
        print_line(f"figure: {out}")
    if as_json:
        print_json({"inversion": rows, "picture": out, "lower_bounds": True})
