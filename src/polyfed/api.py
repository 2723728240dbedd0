"""START HERE: one public function per command; the command line calls these functions. Those of several runs are in ``api_studies.py``.

Where things are: the loop over rounds is ``core/rounds.py``, a client at work ``core/client.py``, the server ``core/server.py``, and
every method is a file in ``methods/``. ``runs/experiment.py`` puts data, model and method together; ``runs/lifecycle.py`` trains,
saves and resumes.

The functions import what they need when they are called, for start-up time only: ``polyfed --help`` answers without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.api_studies import analyse as analyse
from polyfed.api_studies import compare as compare
from polyfed.api_studies import doctor as doctor
from polyfed.api_studies import estimate as estimate
from polyfed.api_studies import report as report
from polyfed.api_studies import reproduce as reproduce
from polyfed.api_studies import sweep as sweep

if TYPE_CHECKING:
    from polyfed.api_studies import Model
    from polyfed.core.method import Method
    from polyfed.runs.callbacks.callback import Callback
    from polyfed.runs.evaluate import Evaluation
    from polyfed.runs.export import Exported
    from polyfed.runs.predict import Predictions
    from polyfed.runs.result import Result


def run(data: Any = "digits-mini", method: str | Method | None = None, model: Model = None, **settings: Any) -> Result:
    """Train a federation and return what came out.

    Args:
        data: The name of a data set, a folder ``root/<domain>/<class>/*``, a Federation or DataSet, or a mapping
            ``{domain: (train, test)}`` of torch data sets.
        method: Its expression, or a Method; default: the method underneath all others.
        model: A name, a module, or a function that builds one; default: the data set's.
        settings: Any field of ``polyfed.Settings`` (``rounds=20``, ``lr=0.05``, ``seed=0``...), ``out=DIR`` to write a run folder,
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
    """Resume a run from its last good checkpoint, to the same end as if it had never stopped.

    Args:
        path: The run folder.
        data: The data, if the run was started from Python with data that have no name.
        model: Likewise; or the model's name, if the run names a function (``module.path:function``) in a foreign file.
        method: The method, if it is a Python value that is not registered.
        load: The method files, if they moved since the run was started.
        root: The folder of the data set's files or of images, if it moved.
        device: Where models are trained, if not as before; another one may round in another way.
        trust: Run the code that the folder names, though this account did not write it (``docs/security.md``).
        progress: Show a progress bar; default: in notebooks.
        callbacks: As for ``polyfed.run``; they receive a message for each damaged file, which is printed if there are none.
        objects: ``optimizer``, ``loss``, ``schedule`` and ``augment``, if the run was given them as objects.

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
    """Open a run as it was left, on a machine that need not have its data.

    Args:
        path: The run folder.
        model: As for ``polyfed.resume``, and so are ``method``, ``load`` and ``trust``.
        device: Where models are computed: cpu, cuda, or auto.
        notify: Called with a message for each damaged file, and if a run is not finished.

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

    Returns:
        ``summary``, the object that ``polyfed evaluate --json`` prints, and ``choices``, the newcomer models that were scored.

    Example:
        ``polyfed.evaluate("runs/digits-mini-fedbn-seed0").summary["accuracy"]``
    """
    from polyfed.runs.evaluate import evaluate_run
    from polyfed.runs.folder.paths import Reopening

    return evaluate_run(path, data, newcomer, split, part, Reopening(root, device, load, model, trust=trust, notify=notify))


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

    Returns:
        ``rows`` with the prediction for each image, and ``unreadable`` with an error message for each image that cannot be read.

    Example:
        ``polyfed.predict("runs/digits-mini-fedbn-seed0", ["seven.png"], client="pen").rows``
    """
    from polyfed.runs.folder.paths import Reopening
    from polyfed.runs.predict import predict_files
    from polyfed.runs.reopen import open_experiment

    how = Reopening(None, device, load, model, trust=trust, notify=notify)
    files = [images] if isinstance(images, str) else list(images)
    return predict_files(lambda: open_experiment(path, how), files, client, newcomer)


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
    """Write a trained model to a file for other programs; its predictions are compared with the model's before it gets its name.

    Args:
        path: The run folder.
        to: onnx, pt2 (torch.export) or safetensors.
        out: The file; default: the name of the run folder, here, with the ending of the form.
        client: Whose model; default: the one model of all clients, if there is one.
        newcomer: The model for newcomers, with local layers averaged.
        fold: Turn standardised convolutions and batch norms into plain convolutions: the same predictions, less work.
        model: As for ``polyfed.open_run``, and so are ``method``, ``load``, ``notify`` and ``trust``.

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
