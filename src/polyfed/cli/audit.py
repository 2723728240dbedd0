"""``polyfed audit``: look after audit logs, and measure what a run or a gradient gives away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.options import Device, Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, console, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath

EXAMPLE = "Example: polyfed audit verify node-1/audit.jsonl"

audit_app = typer.Typer(help="Audit logs of servers and nodes; leakage of runs.", no_args_is_help=True)


@audit_app.command("verify", epilog=EXAMPLE)
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="audit.jsonl of a server or node.")],
    expect: Annotated[
        str, typer.Option("--expect", metavar="HASH", help="A last hash that was noted before; it must still be in the chain.")
    ] = "",
) -> None:
    """Follow the chain of hashes; a line that was changed, added or taken out is named, with exit code 2."""
    from polyfed.runs.folder.audit_log import verify as verified

    found = verified(Path(file), expect)
    print(f"{found.lines} lines, unbroken. Note the last hash elsewhere: {found.last}")


@audit_app.command("spent", epilog="Example: polyfed audit spent node-1/privacy.jsonl")
def spent(
    file: Annotated[str, typer.Argument(metavar="FILE", help="privacy.jsonl of a node.")],
    delta: Annotated[float, typer.Option("--delta", help="At which epsilon is stated.")] = 1e-5,
    as_json: Json = False,
) -> None:
    """Show what a node has spent of its privacy, by its own account: by run, and in all."""
    from polyfed.flower.node.account import account_in

    found = account_in(Path(file), delta)
    if as_json:
        print_json(found)
        return
    shown = table(("run", "trainings", "epsilon", "first", "last"), ("trainings", "epsilon"))
    for run, each in found["runs"].items():
        shown.add_row(run[:12], str(each["trainings"]), f"{each['epsilon']:.4g}", each["first"][:16], each["last"][:16])
    shown.add_row("in all", str(found["trainings"]), f"{found['epsilon']:.4g}", "", "")
    print_table(f"spent at delta = {delta:g}; protects {found['protects']}", shown)


@audit_app.command("leakage", epilog="Example: polyfed audit leakage runs/digits-mini-fedwon-seed0 --shadows 4")
def leakage(
    path: RunFolderPath,
    shadows: Annotated[
        int, typer.Option("--shadows", help="Shadow runs for the likelihood attack, in pairs; each costs as much as the run.")
    ] = 0,
    most: Annotated[int, typer.Option("--most", help="Members, and others, of each client that are attacked at most.")] = 1000,
    root: Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder of the run's data, if they moved.")] = None,
    device: Device = None,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say which samples a run was trained on, by its models; how often that is right is a lower bound of what it gives away."""
    listen(quiet)
    with busy("Opening the run", quiet):
        from polyfed.runs.folder.paths import Reopening
        from polyfed.runs.reopen import open_experiment
        from polyfed.studies.analyse.leakage import membership

        how = Reopening(root, device or "auto", load or None, model, trust=trust, notify=warn)
        experiment = open_experiment(path, how, own_data=True)
    found = {
        "run": str(path),
        "method": str(experiment.method),
        **membership(experiment, shadows, most, notify=lambda text: said(text, quiet)),
    }
    if not quiet:
        print_leakage(found)
    if as_json:
        print_json(found)


def said(text: str, quiet: bool) -> None:
    """A sentence about what is being done."""
    if not quiet:
        console().print(text, markup=False)


def print_leakage(found: dict[str, Any]) -> None:
    """Both attacks by client, by domain and in all."""
    attacks = [name for name in ("loss", "lira") if name in found["all"]]
    heads = [f"{name}: {what}" for name in attacks for what in ("AUC", "TPR at 1 % FPR")]
    shown = table(("of", "name", "members", *heads), ("members", *heads))
    rows = [("client", name, each) for name, each in found["clients"].items()]
    rows += [("domain", name, each) for name, each in found["domains"].items()] + [("all", "", found["all"])]
    for of, name, each in rows:
        cells = [
            cell
            for attack in attacks
            for cell in (f"{each[attack]['auc']:.3f}", f"{100 * each[attack]['tpr_at_1_percent_fpr']:.1f} %")
        ]
        shown.add_row(of, name, str(each["members"]), *cells)
    print_table(f"membership inference on {found['method']} (lower bounds; chance is 0.500 and 1.0 %)", shown)


@audit_app.command("inversion", epilog="Example: polyfed audit inversion digits-mini --images 2 -o inversion.png")
def inversion(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Data set, or a folder root/<domain>/<class>/*.")],
    methods: Annotated[
        str, typer.Option("--methods", help="Methods whose first gradient is inverted, separated by semicolons.")
    ] = "fedavg; fedavg + group_norm; fedwon",
    images: Annotated[int, typer.Option("--images", min=1, help="Images in the batch.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the search.")] = 300,
    root: Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder that holds the data set's files.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model; default: the data set's own.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything random.")] = 0,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Picture with the images and what was found.")
    ] = "inversion.png",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make images from the first gradient of a client, for several methods; a lower bound of what a gradient gives away."""
    listen(quiet)
    with busy("Inverting gradients", quiet):
        from polyfed.settings import Settings
        from polyfed.studies.analyse.gradient_inversion import draw, invert

        settings = Settings(data=data, root=root, model=model, seed=seed, batch_size=max(images, 2)).trusted()
        found = invert(settings, [text.strip() for text in methods.split(";") if text.strip()], images, steps)
        draw(found, Path(out))
    rows = [{name: value for name, value in each.items() if name not in ("original", "found", "pixels")} for each in found]
    if not quiet:
        shown = table(("method", "PSNR, dB", "cosine distance"), ("PSNR, dB", "cosine distance"))
        for row in rows:
            shown.add_row(row["method"], f"{row['psnr']:.2f}", f"{row['cosine_distance']:.4f}")
        print_table(f"images found from one gradient of {images} (lower bounds; higher PSNR: nearer to the original)", shown)
        console().print(f"picture: {out}", markup=False, soft_wrap=True)
    if as_json:
        print_json({"inversion": rows, "picture": out, "lower_bounds": True})
