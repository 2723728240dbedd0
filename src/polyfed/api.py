"""Public API: one function per command. Start reading here.

The round loop is in ``core/rounds.py``, client training in ``core/client.py``, the server in ``core/server.py``, and each method in a
file of ``methods/``. ``runs/experiment.py`` assembles data, model and method; ``runs/lifecycle.py`` trains, saves and resumes. The
functions for several runs are in ``api_studies.py``.

Functions import their dependencies when they are called, so that ``polyfed --help`` does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.api_studies import analyse as analyse
from polyfed.api_studies import compare as compare
from polyfed.api_studies import doctor as doctor
from polyfed.api_studies import estimate as estimate
from polyfed.api_studies import estimate_comparison as estimate_comparison
from polyfed.api_studies import estimate_reproduction as estimate_reproduction
from polyfed.api_studies import report as report
from polyfed.api_studies import reproduce as reproduce
from polyfed.api_studies import sweep as sweep

if TYPE_CHECKING:
    from polyfed.api_studies import ModelSpec
    from polyfed.core.method import Method
    from polyfed.runs.callbacks.callback import Callback
    from polyfed.runs.export import Exported
    from polyfed.runs.predict import Predictions
    from polyfed.runs.reopen import Evaluation
    from polyfed.runs.result import Result


def run(data: Any = "digits-mini", method: str | Method | None = None, model: ModelSpec = None, **settings: Any) -> Result:
    """Train a federation.

    Args:
        data: Name of a data set, folder ``root/<domain>/<class>/*``, table of images, ``Federation``, ``DataSet``, or mapping
            ``{domain: (train, test)}`` of PyTorch data sets.
        method: Method expression or ``Method``. Default: the base method, ``fedavg``.
        model: Model name, module, or function that builds a module. Default: the data set's default model.
        settings: Any field of ``polyfed.Settings``, such as ``rounds=20`` or ``lr=0.05``, and: ``out``, the run folder to write;
            ``progress``, whether to show a progress bar (default: only in notebooks); ``callbacks``, a list of ``polyfed.Callback``, which
            can stop the run; ``track``, ``"tensorboard"``, ``"mlflow"`` or ``"wandb"``. Four settings also accept objects: ``optimizer``
            a PyTorch class or a function of the parameters and ``lr``; ``loss`` a function of the logits and labels; ``schedule`` a
            function of the round and the number of rounds, or a PyTorch scheduler, stepped after each round; ``augment`` a function of
            a uint8 batch.

    Returns:
        Result with the accuracy per domain, the costs, ``model_for(client)`` and ``newcomer()``.

    Example:
        ``polyfed.run("digits-mini", "fedbn", rounds=5).accuracy["mean"]``
    """
    from polyfed.runs.lifecycle import run_experiment

    return run_experiment(data, method, model, **settings)


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
    """Resume a run from its last valid checkpoint. The result is the same as that of an uninterrupted run.

    Args:
        path: Run folder.
        data: Data of the run. Required if the run was started from Python with data that has no name.
        model: Model of the run. Required if the run was started from Python with a model object. Also accepts the model's name, if
            the run names a function (``module.path:function``) in another user's file.
        method: Method of the run. Required if it is a ``Method`` object that is not registered.
        load: Method files, if they have moved since the run was started.
        root: Data set folder or image folder, if it has moved.
        device: Device to train on. Default: the same as before. Another device may round differently.
        trust: Run code named by the run folder even if another user account wrote it (see ``docs/security.md``).
        progress: Show a progress bar. Default: only in notebooks.
        callbacks: Same as for ``polyfed.run``. They receive one message per damaged file; without callbacks, messages are printed.
        objects: ``optimizer``, ``loss``, ``schedule`` and ``augment``, if the run was started with objects.

    Returns:
        Same as ``polyfed.run``.

    Example:
        ``polyfed.resume("runs/digits-mini-fedbn-seed0").accuracy``
    """
    from polyfed.runs import lifecycle
    from polyfed.runs.callbacks.progress import ProgressBar, print_message
    from polyfed.runs.experiment import code_of
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.training_settings import objects_for_resuming
    from polyfed.trust import NOTHING

    options = Reopening(root, device, load, model, method, trust, NOTHING.adding(code_of(data)))
    with ProgressBar(progress, message=None if callbacks else print_message) as bar:
        return lifecycle.resume(path, data, options, [*callbacks, bar], objects=objects_for_resuming(objects))


def open_run(
    path: str | Path,
    model: Any = None,
    method: Method | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    notify: Callable[[str], None] = print,
    trust: bool = False,
    allow_unfinished: bool = False,
) -> Result:
    """Open a run without its data, for example on another machine.

    Args:
        path: Run folder.
        model: Same as for ``polyfed.resume``, as are ``method``, ``load`` and ``trust``.
        device: Device for inference: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        notify: Called with messages for the user, for example if the run is unfinished.
        allow_unfinished: Open the newest good state of a run that is unfinished, diverged, or whose final state is damaged. By default,
            this is an error. The ``warnings`` of the result then name the round.

    Returns:
        Same as ``polyfed.run``. ``newcomer()`` and ``model_for(client)`` are ready to use.

    Example:
        ``polyfed.open_run("runs/digits-mini-fedbn-seed0").newcomer()``
    """
    from polyfed.runs import reopen
    from polyfed.runs.folder.paths import Reopening

    return reopen.open_run(
        path, Reopening(None, device, load, model, method, trust, allow_unfinished=allow_unfinished, notify=notify)
    )


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
    allow_unfinished: bool = False,
    notify: Callable[[str], None] = print,
) -> Evaluation:
    """Evaluate each client's model on its own domain, and the newcomer model on unseen domains.

    Args:
        path: Run folder.
        data: Other data to evaluate on. Domains that are new to the run count as unseen. Default: the run's data.
        newcomer: How to build the local layers of a newcomer, or ``"all"``. Default: as the run does.
        split: Split to evaluate seen clients on: ``"test"`` or ``"validation"``.
        part: Split of the new domains in ``data`` to evaluate on: ``"test"`` (default) or ``"all"``.
        root: Folder with the files of ``data``. Without ``data``: the run's data folder, if it has moved.
        device: Same as for ``polyfed.open_run``, as are ``load``, ``model``, ``trust``, ``allow_unfinished`` and
            ``notify``.

    Returns:
        Evaluation with ``summary``, the object that ``polyfed evaluate --json`` prints, and ``choices``, the evaluated newcomer models.

    Example:
        ``polyfed.evaluate("runs/digits-mini-fedbn-seed0").summary["accuracy"]``
    """
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.reopen import evaluate_run

    how = Reopening(root, device, load, model, trust=trust, allow_unfinished=allow_unfinished, notify=notify)
    return evaluate_run(path, data, newcomer, split, part, how)


def predict(
    path: str | Path,
    images: str | Sequence[str],
    *,
    client: str | None = None,
    newcomer: str | None = None,
    domain: str | None = None,
    device: str = "auto",
    load: Sequence[str] | None = None,
    model: Any = None,
    trust: bool = False,
    allow_unfinished: bool = False,
    notify: Callable[[str], None] = print,
) -> Predictions:
    """Predict the classes of image files, which are preprocessed as in the run.

    Args:
        path: Run folder.
        images: Image files, or folders that contain images.
        client: Use this client's model. Default: the newcomer model.
        newcomer: How to build the local layers of the newcomer model. Default: as the run does.
        domain: Domain of images with more than 8 bits, if the domains of the run scale them differently. Default: that of ``client``.
        device: Same as for ``polyfed.open_run``, as are ``load``, ``model``, ``trust``, ``allow_unfinished`` and
            ``notify``.

    Returns:
        Predictions with one row per image (``rows``), and one error message per unreadable image (``unreadable``).

    Example:
        ``polyfed.predict("runs/digits-mini-fedbn-seed0", ["seven.png"], client="pen").rows``
    """
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.predict import predict_files
    from polyfed.runs.reopen import open_experiment

    options = Reopening(None, device, load, model, trust=trust, allow_unfinished=allow_unfinished, notify=notify)
    files = [images] if isinstance(images, str) else list(images)
    return predict_files(lambda: open_experiment(path, options), files, client, newcomer, domain)


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
    allow_unfinished: bool = False,
) -> Exported:
    """Export a trained model to a file. The outputs are compared with the original model before the file is written.

    Args:
        path: Run folder.
        to: Format: ``"onnx"``, ``"pt2"`` (torch.export) or ``"safetensors"``.
        out: File to write. Default: the name of the run folder with the suffix of the format, in the current folder.
        client: Export this client's model. Default: the global model, if there is only one.
        newcomer: Export the model for a newcomer, with averaged local layers.
        fold: Fold standardised convolutions and batch norms into plain convolutions. The outputs stay the same.
        model: Same as for ``polyfed.open_run``, as are ``method``, ``load``, ``notify``, ``trust`` and
            ``allow_unfinished``.

    Returns:
        Exported file (``path``), its ``metadata``, and its size and speed before and after the export (``forms``).

    Example:
        ``polyfed.export("runs/digits-mini-fedavg-seed0", "onnx", fold=True).path``
    """
    from polyfed.runs.export import export_model, require_form
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.reopen import open_experiment

    require_form(to)
    options = Reopening(None, "cpu", load, model, method, trust, allow_unfinished=allow_unfinished, notify=notify)
    experiment = open_experiment(path, options)
    default_name = f"{Path(path).resolve().name}{'' if client is None else f'-{client}'}{'-newcomer' * newcomer}.{to}"
    return export_model(experiment, to, out or default_name, client, newcomer, fold)
