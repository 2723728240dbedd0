"""One public function per command that is about several runs, or about data before a run; ``api.py`` has them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    from polyfed.core.method import Method
    from polyfed.papers.reproduction import Reproduction
    from polyfed.runs.callbacks.callback import Callback
    from polyfed.runs.result import Result
    from polyfed.studies.analyse.analyse import Analyses
    from polyfed.studies.compare.estimate import Estimate
    from polyfed.studies.doctor.examine import Diagnosis
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.sweep.search import Sweep

    Model: TypeAlias = str | nn.Module | Callable[..., nn.Module] | None
    MethodSpec: TypeAlias = str | Method | tuple[str | Method, Mapping[str, Any]]
    Methods: TypeAlias = MethodSpec | Sequence[MethodSpec] | Mapping[str, Mapping[str, Any]]


def compare(
    data: Any = "digits-mini",
    methods: Methods = (),
    model: Model = None,
    *,
    seeds: int = 1,
    protocol: str = "seen",
    out: str | Path | None = None,
    callbacks: Sequence[Callback] | None = None,
    track: str | Sequence[str] = (),
    **settings: Any,
) -> Comparison:
    """Train several methods with the same data, seeds and settings, and put them in one table.

    Args:
        data: As for ``polyfed.run``; no Federation with ``protocol="leave-one-out"``, since its data are partitioned already.
        methods: Expressions or Method values; one text may name several, separated by semicolons. A method may have its own settings:
            ``"fedwon with lr=0.2"``, ``("fedwon", {"lr": 0.2})``, or a mapping ``{"fedavg": {}, "fedwon": {"lr": 0.2}}``.
        model: As for ``polyfed.run``.
        seeds: Runs of each method: ``seed``, ``seed + 1``, ...
        protocol: ``seen``, or ``leave-one-out``: every domain unseen in turn, all its images tested.
        out: Folder of the run folders: finished runs are reused, stopped ones resumed, unless their model or method is an object.
        callbacks: ``polyfed.Callback`` values, called for every run; default: a progress bar in notebooks, nothing elsewhere.
        track: Trackers of every run: ``tensorboard``, ``mlflow``, ``wandb``.
        settings: Any field of ``polyfed.Settings`` except ``method``.

    Returns:
        A row for each method (``rows``), ``best()``, ``table()`` and ``metrics()`` as pandas frames, ``plot()``, ``warnings``,
        ``certainty``, ``costs``, ``note`` and ``as_json()``. A method that cannot be run has a ``problem`` in its row; the others go on.

    Example:
        ``polyfed.compare("digits-mini", ["fedavg", "fedbn"], seeds=3, rounds=5).best().method``
    """
    from polyfed.studies.compare.compare import ComparedRuns, settings_for
    from polyfed.studies.report.comparison import compare_runs

    chosen = settings_for(data, model, protocol, settings)
    runs = ComparedRuns(
        chosen, methods, data=data, model=model, seeds=seeds, protocol=protocol, folder=out, callbacks=callbacks, track=track
    )
    return compare_runs(runs)


def sweep(
    data: Any = "digits-mini",
    methods: Methods = (),
    search: Mapping[str, Sequence[Any]] | None = None,
    model: str | None = None,
    *,
    trials: int | None = None,
    sampler: str = "tpe",
    halving: bool = False,
    seeds: int = 1,
    hold_out: float | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] | None = None,
    **settings: Any,
) -> Sweep:
    """Search settings of each method on validation data only, with equal budgets, then test what was chosen.

    Args:
        data: As for ``polyfed.run``, but no Federation: a search partitions the data itself, with every test set out of reach.
        methods: As for ``polyfed.compare``, by expressions.
        search: Values to try, by the name of a setting (``lr``) or of an option (``fedprox.mu``).
        model: A name, or ``module.path:function``; default: the data set's.
        trials: Trials of each method, proposed by Optuna: learning rates between those given, other values among them; default: a grid.
        sampler: Who proposes: ``tpe`` (learns from the trials before), or ``random``.
        halving: Successive halving: stop trials that are behind after a ninth and a third of their rounds, and spend the saved rounds on
            further trials; the rounds of training are the same for every method.
        seeds: Final runs of the chosen settings: ``seed``, ``seed + 1``, ...
        hold_out: Fraction of the training data to validate on, if there is no validation split.
        out: Folder of ``sweep.json`` and the runs, which are reused or resumed; default: ``runs/sweep-<data>``.
        callbacks: As for ``polyfed.compare``, and so are ``settings``.

    Returns:
        The finished search: ``searched`` (trials and the chosen one of each method), ``rows()`` (their tests), ``table()`` (a
        pandas frame of all trials) and ``as_json()``.

    Example:
        ``polyfed.sweep("digits-mini", ["fedavg", "fedbn"], {"lr": [0.01, 0.03, 0.1]}, rounds=5).rows()``
    """
    with warnings.catch_warnings():
        # Optuna loads tqdm, which asks for widgets in a notebook; no bar of it is shown.
        warnings.filterwarnings("ignore", "IProgress not found")
        from polyfed.studies.sweep.search import run_sweep

    return run_sweep(
        data,
        methods,
        search or {},
        model,
        out,
        settings,
        trials=trials,
        sampler=sampler,
        halving=halving,
        seeds=seeds,
        hold_out=hold_out,
        callbacks=callbacks,
    )


def doctor(
    data: Any = "digits-mini",
    model: Model = None,
    notify: Callable[[str], None] | None = None,
    **settings: Any,
) -> Diagnosis:
    """Tell from a few steps at each client whether batch norm will hurt a federation, and what to use instead.

    No test image is read, and nothing is written. ``data`` and ``model`` are as for ``polyfed.run``.

    Args:
        notify: Called with a few words about what is measured next.
        settings: Any field of ``polyfed.Settings``; ``batch_size``, ``clients_per_round`` and ``partition`` matter most.

    Returns:
        ``advice`` (verdict, method, runner-up, reasons), ``findings`` with a number and a sentence each, ``outliers`` (clients that stand
        out), what a run would cost, and the command that compares the methods.

    Example:
        ``polyfed.doctor("digits-mini").advice.method``
    """
    from polyfed.studies.doctor.examine import examine

    return examine(data, model, notify, **settings)


def estimate(
    data: Any = "digits-mini", method: str | Method | None = None, model: Model = None, seconds: float = 20.0, **settings: Any
) -> Estimate:
    """Measure what ``polyfed.run`` with the same arguments would cost; nothing is trained to its end.

    Args:
        seconds: About how long it may take to find out.

    Returns:
        CPU seconds (``cpu_seconds``: of the whole run), bytes by client and round, and the peak of memory.

    Example:
        ``polyfed.estimate("digits-mini", "fedbn", rounds=100).cpu_seconds``
    """
    from polyfed.studies.compare.estimate import estimate_run

    return estimate_run(data, method, model, seconds, **settings)


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    metric: str = "auto",
    pictures: bool | None = None,
    analyses: str = "auto",
) -> Path:
    """Write one self-contained page about one or several runs: who won and how surely, what it costs, why, how to run it again.

    Args:
        runs: Run folders, or folders that hold run folders.
        out: The file to write; it needs no other file and no network.
        metric: The primary metric of the tables: auto, accuracy, balanced_accuracy, macro_f1 or auroc.
        pictures: Show images of the data; None: if this account made the runs, and the data are here.
        analyses: Sections that say why: auto (those that need no data), all, none, or names of kinds with commas between them.

    Returns:
        The file.

    Example:
        ``polyfed.report("runs/compare-digits-mini", "report.html")``
    """
    from polyfed.studies.report.html import report_on

    return report_on(runs, out, metric, pictures, analyses)


def analyse(
    runs: str | Path | Result | Sequence[str | Path | Result],
    kinds: str | Sequence[str] = (),
    *,
    root: str | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    model: str | None = None,
    trust: bool = False,
    notify: Callable[[str], None] = print,
) -> Analyses:
    """Look into trained runs: batch-norm statistics, features, gradients, confidence. The runs stay as they are.

    Args:
        runs: Results, run folders, or folders that hold run folders.
        kinds: Names of kinds (``polyfed analyse --kinds``); default: all.
        root: The folder of the runs' data, if they moved.
        device: As for ``polyfed.open_run``, and so are ``load``, ``model``, ``trust`` and ``notify``.

    Returns:
        An analysis by each kind: ``found["tsne"].sentence``, ``.tables``, ``.figures``, ``as_json()``. ``skipped`` says which kinds do not
        apply to which run, and why.

    Example:
        ``polyfed.analyse("runs/compare-digits-mini", "confidence")["confidence"].sentence``
    """
    from polyfed.runs.result import Result
    from polyfed.studies.analyse.analyse import analyse_runs
    from polyfed.studies.report.run_record import run_folders

    named = [runs] if isinstance(runs, str | Path | Result) else list(runs)
    opened: list[str | Path | Result] = []
    for one in named:
        opened += [one] if isinstance(one, Result) else run_folders([one])
    how = {"root": root, "device": device, "load": load, "model": model, "trust": trust}
    return analyse_runs(opened, (kinds,) if isinstance(kinds, str) else kinds, how, notify)


def reproduce(
    experiment: str,
    root: str | Path | None = None,
    *,
    form: str = "full",
    only: str | Sequence[str] = (),
    columns: str | Sequence[str] = (),
    seeds: int | None = None,
    out: str | Path = "runs/reproduce",
    callbacks: Sequence[Callback] | None = None,
    **settings: Any,
) -> Reproduction:
    """Reproduce a table or figure of a paper: train what is missing, and put our numbers beside the published ones.

    Args:
        experiment: Its name, such as ``fedwon/table-1`` (``polyfed ls experiments``).
        root: The folder of the data sets' files; cells whose data are not there say "no data".
        form: ``full`` (the paper's setting), ``laptop`` (runs of about half a core-hour, three seeds) or ``reduced`` (a few minutes, one
            seed: shows that it runs), as the experiment's file defines them.
        only: Names of methods, as the table or the expression has them; the others are skipped.
        columns: Names of columns, as the table heads them, or of parts; the others are skipped.
        seeds: Runs of each cell; default: as the paper, or as the form says.
        out: Folder of runs and pages. Finished runs are reused and stopped ones resumed, also by other experiments with the same runs.
        callbacks: As for ``polyfed.compare``.
        settings: Any field of ``polyfed.Settings``, instead of the experiment's; cells say that they differ.

    Returns:
        Every cell with the published number and ours (``outcomes``, ``as_json()``), and the written ``page``.

    Example:
        ``polyfed.reproduce("fedwon/table-1", "~/data", form="laptop", only="FedBN").page``
    """
    from polyfed.papers.files import read_item
    from polyfed.papers.grid import Form
    from polyfed.papers.page import write_page
    from polyfed.papers.reproduction import reproduce_item

    rows, heads = ((names,) if isinstance(names, str) else tuple(names) for names in (only, columns))
    asked = Form(form, rows, seeds, settings, columns=heads)
    found = reproduce_item(read_item(experiment), asked, root, out, callbacks)
    write_page(found)
    return found
