"""Notebooks run in a kernel of their own; a kernel that dies says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT


def executed(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A notebook after all its cells, run in a folder.

    The kernel has one thread and no files of the account: several may start at once, next to other tests. What it writes to standard
    error goes to a file, for nbclient says of a kernel that died only that it did.
    """
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from nbclient.exceptions import DeadKernelError

    for name, value in {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
    }.items():
        monkeypatch.setenv(name, value)
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    with open(folder / "kernel.log", "w+") as log:
        try:
            client.execute(stdout=log, stderr=log)
        except DeadKernelError:
            process = getattr(getattr(client.km, "provisioner", None), "process", None)
            code = None if process is None else process.poll()
            log.seek(0)
            pytest.fail(f"the kernel ended with code {code} (below 0: a signal) and said:\n{log.read()[-3000:]}")
    return notebook


def outputs(cell: Any, form: str) -> list[str]:
    """What a cell shows in a form (``text/html``)."""
    return [output.data[form] for output in cell.outputs if form in output.get("data", {})]
