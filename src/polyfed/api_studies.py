"""Public API for several runs, and for data before a run: compare, sweep, doctor, estimate, report, analyse, reproduce."""

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
    from polyfed.studies.compare.estimate import Estimate, MethodEstimate
    from polyfed.studies.doctor.examine import Diagnosis
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.sweep.search import Sweep

    ModelSpec: TypeAlias = str | nn.Module | Callable[..., nn.Module] | None
    MethodSpec: TypeAlias = str | Method | tuple[str | Method, Mapping[str, Any]]
    MethodSpecs: TypeAlias = MethodSpec | Sequence[MethodSpec] | Mapping[str, Mapping[str, Any]]


def compare(
    data: Any = "digits-mini",
    methods: MethodSpecs = (),
    model: ModelSpec = None,
    *,
    seeds: int = 1,
    protocol: str = "seen",
    out: str | Path | None = None,
    callbacks: Sequence[Callback] | None = None,
    track: str | Sequence[str] = (),
    **settings: Any,
) -> Comparison:
    """Train several methods with the same data, seeds and settings, and compare them.

    Args:
        data: Same as for ``polyfed.run``. A ``Federation`` is already partitioned, so it cannot be used with
            ``protocol="leave-one-out"``.
        methods: Method expressions or ``Method`` objects. One string can hold several expressions, separated by semicolons. To
            change settings for one method only, pass ``"fedwon with lr=0.2"``, ``("fedwon", {"lr": 0.2})``, or a mapping
            ``{"fedavg": {}, "fedwon": {"lr": 0.2}}``.
        model: Same as for ``polyfed.run``.
        seeds: Number of runs per method, with the seeds ``seed``, ``seed + 1``, and so on.
        protocol: ``"seen"``, or ``"leave-one-out"`` to hold out each domain in turn and test on all of its images.
        out: Folder for the run folders. Finished runs in it are reused and interrupted runs are resumed. Runs whose model or method
            was passed as an object are retrained. Default: write nothing.
        callbacks: ``polyfed.Callback`` objects that receive the progress of every run. Default: a progress bar in notebooks,
            otherwise none.
        track: Experiment trackers to log every run to: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``.
        settings: Any field of ``polyfed.Settings`` except ``method``.

    Returns:
        Comparison with one row per method (``rows``), ``best()``, ``table()`` and ``metrics()`` as pandas frames, ``plot()``,
        ``warnings``, ``significance``, ``costs``, ``note`` and ``as_json()``. If a method cannot be run, its row has a ``problem``
        and the other methods still run.

    Example:
        ``polyfed.compare("digits-mini", ["fedavg", "fedbn"], seeds=3, rounds=5).best().method``
    """
    from polyfed.studies.compare.compare import ComparedRuns, settings_for
    from polyfed.studies.report.comparison import compare_runs

    resolved = settings_for(data, model, protocol, settings)
    runs = ComparedRuns(
        resolved, methods, data=data, model=model, seeds=seeds, protocol=protocol, folder=out, callbacks=callbacks, track=track
    )
    return compare_runs(runs)


def sweep(
    data: Any = "digits-mini",
    methods: MethodSpecs = (),
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
    """Tune each method on validation data with the same budget, then test the chosen settings.

    Args:
        data: Same as for ``polyfed.run``, except that a ``Federation`` is not accepted: the search partitions the data itself and
            removes all test sets.
        methods: Same as for ``polyfed.compare``. ``Method`` objects must be expressible as text.
        search: Values to try, by setting (``lr``) or method option (``fedprox.mu``).
        model: Model name, or ``module.path:function``. Default: the data set's default model.
        trials: Number of trials per method, proposed by Optuna: learning rates between the given values, other settings among them.
            Default: a full grid.
        sampler: Optuna sampler: ``"tpe"``, which learns from earlier trials, or ``"random"``.
        halving: Use successive halving: stop the trials that are behind after 1/9 and 1/3 of their rounds, and spend the saved
            rounds on more trials. The number of training rounds is the same for every method.
        seeds: Number of final runs with the chosen settings, with the seeds ``seed``, ``seed + 1``, and so on.
        hold_out: Fraction of the training data to use for validation if the data set has no validation split.
        out: Folder for ``sweep.json`` and the runs, which are reused or resumed. Default: ``runs/sweep-<data>``.
        callbacks: Same as for ``polyfed.compare``, as are ``settings``.

    Returns:
        Sweep with ``searched`` (the trials and the chosen one per method), ``rows()`` (test results), ``table()`` (a pandas frame
        of all trials) and ``as_json()``.

    Example:
        ``polyfed.sweep("digits-mini", ["fedavg", "fedbn"], {"lr": [0.01, 0.03, 0.1]}, rounds=5).rows()``
    """
    with warnings.catch_warnings():
        # Optuna imports tqdm, which warns about missing notebook widgets. Its progress bar is never shown.
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
    data: Any = "digits-mini", model: ModelSpec = None, notify: Callable[[str], None] | None = None, **settings: Any
) -> Diagnosis:
    """Diagnose whether shared batch norm will hurt a federation, and recommend a method.

    Takes a few training steps on each client. It does not read test images or write files. ``data`` and ``model`` are the same as for
    ``polyfed.run``.

    Args:
        notify: Called with a short description of each step.
        settings: Any field of ``polyfed.Settings``. The most relevant are ``batch_size``, ``clients_per_round`` and ``partition``.

    Returns:
        Diagnosis with ``advice`` (verdict, method, runner-up, reasons), ``findings`` (a number and its explanation), ``outliers``
        (clients that stand out), the estimated cost of a run, and a command that compares the recommended methods.

    Example:
        ``polyfed.doctor("digits-mini").advice.method``
    """
    from polyfed.studies.doctor.examine import examine

    return examine(data, model, notify, **settings)


def estimate(
    data: Any = "digits-mini", method: str | Method | None = None, model: ModelSpec = None, seconds: float = 20.0, **settings: Any
) -> Estimate:
    """Estimate the cost of ``polyfed.run`` with the same arguments, from a few batches.

    Args:
        seconds: Approximate time to spend on measuring.

    Returns:
        Estimate with the CPU time of the whole run (``cpu_seconds``), the traffic per client and round, and the peak memory.

    Example:
        ``polyfed.estimate("digits-mini", "fedbn", rounds=100).cpu_seconds``
    """
    from polyfed.studies.compare.estimate import estimate_run

    return estimate_run(data, method, model, seconds, **settings)


def estimate_comparison(
    data: Any = "digits-mini",
    methods: MethodSpecs = (),
    model: str | None = None,
    *,
    seeds: int = 1,
    protocol: str = "seen",
    notify: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[MethodEstimate]:
    """Estimate the cost of ``polyfed.compare`` with the same arguments, for each method. ``notify`` receives status messages."""
    from polyfed.studies.compare.compare import ComparedRuns, settings_for
    from polyfed.studies.compare.estimate import estimate_runs

    runs = ComparedRuns(settings_for(data, model, protocol, settings), methods, seeds=seeds, protocol=protocol)
    return estimate_runs(runs.runs, runs.data, notify or (lambda text: None))


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    metric: str = "auto",
    pictures: bool | None = None,
    analyses: str = "auto",
    allow_unfinished: bool = False,
) -> Path:
    """Write a self-contained HTML report: the best method and the confidence in it, costs, explanations, and commands to repeat it.

    Args:
        runs: Run folders, or folders that contain run folders.
        out: File to write. It needs no other files and no network.
        metric: Primary metric of the tables: ``"auto"``, ``"accuracy"``, ``"balanced_accuracy"``, ``"macro_f1"`` or ``"auroc"``.
        pictures: Include images from the data. Default: only if this user account created the runs and the data is available.
        analyses: Analyses to include: ``"auto"`` (those that need no data), ``"all"``, ``"none"``, or a comma-separated list.
        allow_unfinished: Use the newest good state of runs whose final state is damaged. By default, this is an error. Runs that are
            still training, or that diverged, are shown with their round and never ranked.

    Returns:
        Path of the report.

    Example:
        ``polyfed.report("runs/compare-digits-mini", "report.html")``
    """
    from polyfed.studies.report.html import report_on

    return report_on(runs, out, metric, pictures, analyses, allow_unfinished)


def analyse(
    runs: str | Path | Result | Sequence[str | Path | Result],
    kinds: str | Sequence[str] = (),
    *,
    root: str | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    model: str | None = None,
    trust: bool = False,
    allow_unfinished: bool = False,
    notify: Callable[[str], None] = print,
) -> Analyses:
    """Analyse trained runs: batch-norm statistics, features, gradients, confidence. The runs are not modified.

    Args:
        runs: Results, run folders, or folders that contain run folders.
        kinds: Analyses to run (``polyfed analyse --kinds`` lists them). Default: all.
        root: Data folder, if it has moved.
        device: Same as for ``polyfed.open_run``, as are ``load``, ``model``, ``trust``, ``allow_unfinished`` and
            ``notify``.

    Returns:
        Analyses by kind, for example ``analyses["tsne"].sentence``, ``.tables`` and ``.figures``, and ``as_json()``. ``skipped``
        lists the kinds that do not apply to a run, with the reason.

    Example:
        ``polyfed.analyse("runs/compare-digits-mini", "confidence")["confidence"].sentence``
    """
    from polyfed.runs.result import Result
    from polyfed.studies.analyse.analyse import analyse_runs
    from polyfed.studies.report.run_record import run_folders

    folders: list[str | Path | Result] = []
    for source in [runs] if isinstance(runs, str | Path | Result) else runs:
        folders += [source] if isinstance(source, Result) else run_folders([source])
    options = {"root": root, "device": device, "load": load, "model": model, "trust": trust, "allow_unfinished": allow_unfinished}
    return analyse_runs(folders, (kinds,) if isinstance(kinds, str) else kinds, options, notify)


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
    """Reproduce a table or figure from a paper: train the missing runs, and compare the results with the published numbers.

    Args:
        experiment: Name, such as ``"fedwon/table-1"`` (``polyfed ls experiments`` lists them).
        root: Folder with the data sets. Cells whose data is missing show "no data".
        form: ``"full"`` (the settings of the paper), ``"laptop"`` (runs of about half a core-hour, three seeds) or ``"reduced"`` (a few
            minutes, one seed, to check that it runs), as defined in the experiment file.
        only: Methods to run, by their name in the table or their expression. Default: all.
        columns: Columns or parts to run, by their name in the table. Default: all.
        seeds: Number of runs per cell. Default: as in the paper, or as the form specifies.
        out: Folder for runs and pages. Finished runs are reused and interrupted runs are resumed, even across experiments.
        callbacks: Same as for ``polyfed.compare``.
        settings: Any field of ``polyfed.Settings``, to override the experiment's settings. Affected cells are marked.

    Returns:
        Reproduction with the published and measured number of every cell (``outcomes``, ``as_json()``) and its ``page``.

    Example:
        ``polyfed.reproduce("fedwon/table-1", "~/data", form="laptop", only="FedBN").page``
    """
    from polyfed.papers.files import read_item
    from polyfed.papers.grid import Form
    from polyfed.papers.page import write_page
    from polyfed.papers.reproduction import reproduce_item

    methods, column_names = ((names,) if isinstance(names, str) else tuple(names) for names in (only, columns))
    request = Form(form, methods, seeds, settings, columns=column_names)
    reproduction = reproduce_item(read_item(experiment), request, root, out, callbacks)
    write_page(reproduction)
    return reproduction


def estimate_reproduction(
    experiment: str | None = None,
    root: str | None = None,
    *,
    form: str = "full",
    only: str | Sequence[str] = (),
    columns: str | Sequence[str] = (),
    seeds: int | None = None,
    notify: Callable[[str], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Estimate the cost of ``polyfed.reproduce`` with the same arguments, or of all experiments if ``experiment`` is None."""
    from polyfed.papers.estimates import estimate_experiment, estimate_experiments
    from polyfed.papers.grid import Form

    methods, column_names = ((names,) if isinstance(names, str) else tuple(names) for names in (only, columns))
    request = Form(form, methods, seeds, settings, columns=column_names)
    if experiment is None:
        return estimate_experiments(request)
    return estimate_experiment(experiment, request, root, notify or (lambda text: None))
