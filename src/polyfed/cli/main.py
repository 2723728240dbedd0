"""The command ``polyfed``. Nothing heavy is imported before a command needs it, so that help comes at once."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from polyfed.cli import (
    compare,
    cp,
    digest,
    evaluate,
    inspect,
    join,
    ls,
    predict,
    report,
    reproduce,
    run,
    serve,
    show,
    sweep,
    validate,
    watch,
)
from polyfed.cli.audit import audit_app
from polyfed.cli.data import data_app
from polyfed.cli.deploy import deploy_app
from polyfed.cli.guard import Guarded
from polyfed.cli.nodes import nodes_app
from polyfed.costs.malloc import keep_freed_pages

app = typer.Typer(
    name="polyfed",
    cls=Guarded,
    help="Multi-domain federated learning: a method is a value, and methods add up.",
    epilog="Start with: polyfed compare digits-mini --methods 'fedavg; fedbn' --rounds 5",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def globally(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", envvar="POLYFED_DEBUG", help="Show the stack trace of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Multi-domain federated learning: a method is a value, and methods add up."""
    if version:
        print(_version())
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("polyfed")
    except PackageNotFoundError:
        return "not installed"


app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("compare", epilog=compare.EXAMPLE)(compare.compare)
app.command("reproduce", epilog=reproduce.EXAMPLE)(reproduce.reproduce)
app.command("sweep", epilog=sweep.EXAMPLE)(sweep.sweep)
app.command("resume", epilog=run.RESUME_EXAMPLE)(run.resume)
app.command("evaluate", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("predict", epilog=predict.EXAMPLE)(predict.predict)
app.command("report", epilog=report.EXAMPLE)(report.report)
app.command("watch", epilog=watch.EXAMPLE)(watch.watch)
app.command("digest", epilog=digest.EXAMPLE)(digest.digest)
app.command("inspect", epilog=inspect.EXAMPLE)(inspect.inspect)
app.command("ls", epilog=ls.EXAMPLE)(ls.ls)
app.command("show", epilog=show.EXAMPLE)(show.show)
app.command("cp", epilog=cp.EXAMPLE)(cp.cp)
app.command("validate", epilog=validate.EXAMPLE)(validate.validate)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("join", epilog=join.EXAMPLE)(join.join)
app.add_typer(nodes_app, name="nodes")
app.add_typer(audit_app, name="audit")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Run the command line."""
    # Before torch is imported: large tensors on huge pages save a tenth of the time of a step with 14 million parameters.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed_pages()
    app(prog_name="polyfed")


if __name__ == "__main__":
    main()
