"""START HERE: one public function per command; the command line calls these functions.

Where things are: the loop over rounds is ``core/loop.py``, a client at work ``core/client.py``, the server ``core/server.py``, and
every method is a file in ``methods/``. ``runs/experiment.py`` puts data, model and method together; ``runs/lifecycle.py`` trains,
saves and resumes.

The functions import what they need when they are called, for start-up time only: ``polyfed --help`` answers without importing torch.
"""

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
    from polyfed.runs.evaluate import Evaluation
    from polyfed.runs.export import Exported
    from polyfed.runs.predict import Predictions
    from polyfed.runs.result import Result
    from polyfed.studies.analyse.analyse import Analyses
    from polyfed.studies.compare.estimate import Estimate
    from polyfed.studies.doctor.examine import Diagnosis
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.sweep.search import Sweep

    Model: TypeAlias = str | nn.Module | Callable[..., nn.Module] | None
    OneMethod: TypeAlias = str | Method | tuple[str | Method, Mapping[str, Any]]
    Methods: TypeAlias = OneMethod | Sequence[OneMethod] | Mapping[str, Mapping[str, Any]]


def run(data: Any = "digits-mini", method: str | Method | None = None, model: Model = None, **settings: Any) -> Result:
    """Train a federation and return what came out.

    Args:
        data: the name of a data set, a folder ``root/<domain>/<class>/*``, a Federation or DataSet, or a mapping
            ``{domain: (train, test)}`` of torch data sets.
        method: its text, or a Method; default: the method underneath all others.
        model: a name, a module, or a function that builds one; default: the data set's own.
        settings: any field of ``polyfed.Settings`` (``rounds=20``, ``lr=0.05``, ``seed=0``...), ``out=DIR`` to write a run folder,
            ``progress=True`` for a progress bar (default: in notebooks), ``callbacks=[...]`` (``polyfed.Callback``: may stop the run), and
            ``track="tensorboard"``, ``"mlflow"`` or ``"wandb"``. ``optimizer``, ``loss``, ``schedule`` and ``augment`` may be objects:
            a class of torch or a function (of parameters and ``lr``; of logits and labels; of a round and the number of rounds, or a
            scheduler of torch, stepped after each round; of a uint8 batch).

    Returns:
        The accuracy table, the costs, ``model_for(client)`` and ``newcomer()``.

    Example:
        ``polyfed.run("digits-mini", "fedbn", rounds=5).accuracy["mean"]``
    """
    from polyfed.runs.lifecycle import run_experiment

    return run_experiment(data, method, model, **settings)


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
        data: as for ``polyfed.run``. A Federation cannot be compared with ``protocol="leave-one-out"``, since it is dealt already.
        methods: texts or Method values; one text may name several, apart by semicolons. A method may have settings of its own:
            ``"fedwon with lr=0.2"``, ``("fedwon", {"lr": 0.2})``, or a mapping ``{"fedavg": {}, "fedwon": {"lr": 0.2}}``.
        model: as for ``polyfed.run``.
        seeds: runs of each method: ``seed``, ``seed + 1``, ...
        protocol: ``seen``, or ``leave-one-out``: every domain unseen in turn, all its images tested.
        out: folder of the run folders. Finished runs in it are reused, stopped ones resumed; a run with a model or method given as an
            object is trained again. None: nothing is written.
        callbacks: ``polyfed.Callback`` values, called for every run; default: a progress bar in notebooks, nothing elsewhere.
        track: trackers that every run is written to: ``tensorboard``, ``mlflow``, ``wandb``.
        settings: any field of ``polyfed.Settings`` except ``method``.

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
        data: as for ``polyfed.run``, but no Federation: a search deals the data itself, with every test set out of reach.
        methods: as for ``polyfed.compare``; Method values are such that their text stands for.
        search: values to try, by the name of a setting (``lr``) or of an option (``fedprox.mu``).
        model: a name, or ``module.path:function``; default: the data set's own.
        trials: the number of trials for each method, proposed by Optuna: learning rates between those given, other values among those
            given; default: a grid.
        sampler: who proposes: ``tpe`` (learns from the trials before), or ``random``.
        halving: successive halving: stop trials that are behind after a ninth and a third of their rounds, and spend what that saves on
            further trials; the rounds of training are the same for every method.
        seeds: final runs of the chosen settings: ``seed``, ``seed + 1``, ...
        hold_out: share of the training data to validate on, where there is no validation part.
        out: folder of ``sweep.json`` and the runs, which are reused or resumed; default: ``runs/sweep-<data>``.
        callbacks: ``polyfed.Callback`` values, called for every run; default: a progress bar in notebooks, nothing elsewhere.
        settings: any field of ``polyfed.Settings`` except ``method``.

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
    """Whether batch norm will hurt a federation, and what to use instead, told from a few steps at each client.

    No test image is read, and nothing is written.

    Args:
        data: as for ``polyfed.run``.
        model: as for ``polyfed.run``.
        notify: called with a few words about what is measured next.
        settings: any field of ``polyfed.Settings``; ``batch_size``, ``clients_per_round`` and ``partition`` matter most.

    Returns:
        ``advice`` (verdict, method, runner-up, reasons), ``findings`` with a number and a sentence each, ``apart`` (clients that stand
        out), what a run would cost, and the command that compares the methods.

    Example:
        ``polyfed.doctor("digits-mini").advice.method``
    """
    from polyfed.studies.doctor.examine import examine

    return examine(data, model, notify, **settings)


def estimate(
    data: Any = "digits-mini", method: str | Method | None = None, model: Model = None, seconds: float = 20.0, **settings: Any
) -> Estimate:
    """What ``polyfed.run`` with the same arguments would cost; nothing is trained to its end.

    Args:
        data: as for ``polyfed.run``.
        method: as for ``polyfed.run``.
        model: as for ``polyfed.run``.
        seconds: about how long it may take to find out.
        settings: any field of ``polyfed.Settings``.

    Returns:
        CPU seconds (``cpu_seconds``: of the whole run), bytes by client and round, and the peak of memory.

    Example:
        ``polyfed.estimate("digits-mini", "fedbn", rounds=100).cpu_seconds``
    """
    from polyfed.studies.compare.estimate import estimate_run

    return estimate_run(data, method, model, seconds, **settings)


def resume(
    path: str | Path,
    data: Any = None,
    model: Any = None,
    *,
    method: Method | None = None,
    load: Sequence[str] | None = None,
    root: str | None = None,
    device: str | None = None,
    trust: bool = False,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    **objects: Any,
) -> Result:
    """Go on with a run from its last good checkpoint, to the same end as if it had never stopped.

    Args:
        path: the run folder.
        data: the data, where the run was started from Python with data that have no name.
        model: likewise; or the model's name, where the run names a function (``module.path:function``) in a file of somebody else.
        method: the method, where it is a value of Python that is not registered.
        load: the files of methods, where they lie elsewhere than when the run was begun.
        root: the folder of the data set's files, or the folder of images, where it lies elsewhere.
        device: where models are trained, if not as before; another one may round in another way.
        trust: run the code that the folder names, though this account did not write it (``docs/security.md``).
        progress: show a progress bar; default: in notebooks.
        callbacks: as for ``polyfed.run``; they receive a message for each damaged file, which is printed if there are none.
        objects: ``optimizer``, ``loss``, ``schedule`` and ``augment``, where the run was given them as objects.

    Returns:
        As ``polyfed.run``.

    Example:
        ``polyfed.resume("runs/digits-mini-fedbn-seed0").accuracy``
    """
    from polyfed.runs import given_objects, lifecycle
    from polyfed.runs.callbacks.progress import ProgressBar, print_message
    from polyfed.runs.experiment import code_of
    from polyfed.runs.folder.paths import Reopening
    from polyfed.trust import NOTHING

    how = Reopening(root, device, load, model, method, trust, NOTHING.adding(code_of(data)))
    with ProgressBar(progress, message=None if callbacks else print_message) as bar:
        return lifecycle.resume(path, data, how, [*callbacks, bar], objects=given_objects.checked(objects))


def open_run(
    path: str | Path,
    model: Any = None,
    method: Method | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    notify: Callable[[str], None] = print,
    trust: bool = False,
) -> Result:
    """A run as it was left, on a machine that need not have its data.

    Args:
        path: the run folder.
        model: the model, where the run was started from Python with one; or its name, as for ``polyfed.resume``.
        method: likewise.
        device: where models are computed: cpu, cuda, or auto.
        load: the files of methods, where they lie elsewhere than when the run was begun.
        notify: called with a sentence for each damaged file, and where a run is not finished.
        trust: run the code that the folder names, though this account did not write it (``docs/security.md``).

    Returns:
        As ``polyfed.run``; ``newcomer()`` and ``model_for(client)`` are ready to use.

    Example:
        ``polyfed.open_run("runs/digits-mini-fedbn-seed0").newcomer()``
    """
    from polyfed.runs import reopen
    from polyfed.runs.folder.paths import Reopening

    return reopen.open_run(path, Reopening(None, device, load, model, method, trust, notify=notify))


def evaluate(
    path: str | Path,
    data: str | None = None,
    *,
    newcomer: str | None = None,
    split: str = "test",
    part: str | None = None,
    root: str | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    model: Any = None,
    trust: bool = False,
    notify: Callable[[str], None] = print,
) -> Evaluation:
    """Score a run: each seen client's model, and the newcomer model on unseen domains.

    Args:
        path: The run folder.
        data: Other data; domains the run does not know are unseen. Default: the run's data.
        newcomer: Local layers of the newcomer model, or ``all`` for every choice. Default: the run's choice.
        split: Images that seen clients are scored on: ``test`` or ``validation``.
        part: Images of new domains in ``data`` that are scored: ``test`` (default) or ``all``.
        root: The folder of the files of ``data``; without ``data``, of the run's data, if they moved.
        device: As for ``polyfed.open_run``, and so are ``load``, ``model``, ``trust`` and ``notify``.
        load: See there.
        model: See there.
        trust: See there.
        notify: See there.

    Returns:
        ``summary``, the object that ``polyfed evaluate --json`` prints, and ``choices``, the newcomer models that were scored.

    Example:
        ``polyfed.evaluate("runs/digits-mini-fedbn-seed0").summary["accuracy"]``
    """
    from polyfed.runs.evaluate import evaluate_run
    from polyfed.runs.folder.paths import Reopening

    how = Reopening(root, device, load, model, trust=trust, notify=notify)
    return evaluate_run(path, data, newcomer, split, part, how)


def predict(
    path: str | Path,
    images: str | Sequence[str],
    *,
    client: str | None = None,
    newcomer: str | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    model: Any = None,
    trust: bool = False,
    notify: Callable[[str], None] = print,
) -> Predictions:
    """Predict the class of image files, which are read as the run's images were.

    Args:
        path: The run folder.
        images: Image files, or folders of them.
        client: The client whose model predicts. Default: the newcomer model.
        newcomer: Local layers of the newcomer model. Default: the run's choice.
        device: As for ``polyfed.open_run``, and so are ``load``, ``model``, ``trust`` and ``notify``.
        load: See there.
        model: See there.
        trust: See there.
        notify: See there.

    Returns:
        ``rows`` with the prediction for each image, and ``unreadable`` with an error message for each image that cannot be read.

    Example:
        ``polyfed.predict("runs/digits-mini-fedbn-seed0", ["seven.png"], client="pen").rows``
    """
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.predict import predict_files

    how = Reopening(None, device, load, model, trust=trust, notify=notify)
    return predict_files(path, [images] if isinstance(images, str) else list(images), client, newcomer, how)


def export(
    path: str | Path,
    to: str = "onnx",
    out: str | Path | None = None,
    *,
    client: str | None = None,
    newcomer: bool = False,
    fold: bool = False,
    model: Any = None,
    method: Method | None = None,
    load: Sequence[str] | None = None,
    notify: Callable[[str], None] = print,
    trust: bool = False,
) -> Exported:
    """Write a trained model to a file for other programs; its answers are compared with the model's before it gets its name.

    Args:
        path: the run folder.
        to: onnx, pt2 (torch.export) or safetensors.
        out: the file; default: the name of the run folder, here, with the ending of the form.
        client: whose own model; default: the one model of all clients, where there is one.
        newcomer: the model for somebody new, with local layers averaged.
        fold: turn standardised convolutions and batch norms into plain convolutions: the same answers, less work.
        model: as for ``polyfed.open_run``, and so are ``method``, ``load``, ``notify`` and ``trust``.
        method: see there.
        load: see there.
        notify: see there.
        trust: see there.

    Returns:
        The file (``path``), what it says of itself (``metadata``), and sizes and speeds before and after (``forms``).

    Example:
        ``polyfed.export("runs/digits-mini-fedavg-seed0", "onnx", fold=True).path``
    """
    from polyfed.runs.export import export_model, require_form
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.reopen import open_experiment

    require_form(to)
    experiment = open_experiment(path, Reopening(None, "cpu", load, model, method, trust, notify=notify))
    named = f"{Path(path).resolve().name}{'' if client is None else f'-{client}'}{'-newcomer' * newcomer}.{to}"
    return export_model(experiment, to, out or named, client, newcomer, fold)


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
        runs: run folders, or folders that hold run folders.
        out: the file to write; it needs no other file and no network.
        metric: the measure that heads the tables: auto, accuracy, balanced_accuracy, macro_f1 or auroc.
        pictures: whether images of the data are shown; None: where this account made the runs, and the data are here.
        analyses: sections that say why: auto (those that need no data), all, none, or names of kinds with commas between them.

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
        runs: results, run folders, or folders that hold run folders.
        kinds: names of kinds (``polyfed analyse --kinds``); default: all.
        root: the folder of the runs' own data, if they moved.
        device: where models are computed: cpu, cuda, or auto.
        load: the files of methods, where they lie elsewhere than when a run was begun.
        model: the model's name, as for ``polyfed.resume``.
        trust: run the code that a folder names, though this account did not write it (``docs/security.md``).
        notify: called with a sentence for each damaged file.

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
        experiment: its name, such as ``fedwon/table-1`` (``polyfed ls experiments``).
        root: the folder of the data sets' files; cells whose data are not there say "no data".
        form: ``full`` (the paper's setting), ``laptop`` (the largest setting whose runs cost about half a core-hour, three seeds) or
            ``reduced`` (a few minutes, one seed: shows that it runs), as the experiment's file defines them.
        only: names of methods, as the table or the text form has them; the others are left out.
        columns: names of columns, as the table heads them, or of parts; the others are left out.
        seeds: runs of each cell; default: as the paper, or as the form says.
        out: folder of runs and pages. Finished runs in it are reused, stopped ones resumed, also by other experiments with the same runs.
        callbacks: ``polyfed.Callback`` values, called for every run; default: a progress bar in notebooks, nothing elsewhere.
        settings: any field of ``polyfed.Settings``, in the place of the experiment's own; cells say that they differ.

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
