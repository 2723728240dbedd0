"""Fixtures every test may use: real data beside the checkout, a browser, and settings that keep results repeatable."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("helpers")

from helpers.command_line import images, polyfed  # noqa: E402
from helpers.made_once import make_digits_mini_once  # noqa: E402
from helpers.paths import ROOT  # noqa: E402

__all__ = ["images", "polyfed"]

make_digits_mini_once()

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

torch.set_num_threads(1)

# The key of the account that runs the tests is not theirs to make or to use; commands in processes of their own inherit this.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="polyfed-tests-config-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def logger_left_as_it_was() -> Iterator[None]:
    """Commands run in the tests' own process set the level of polyfed's logger; other tests listen to it.

    Put right before every test too: fixtures of a whole file, which run earlier, may have called commands.
    """
    log = logging.getLogger("polyfed")
    log.setLevel(logging.NOTSET)
    log.handlers[:] = []
    yield
    log.setLevel(logging.NOTSET)
    log.handlers[:] = []


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real image data: POLYFED_DATA, or shared/data beside the checkout."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("POLYFED_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder; set POLYFED_DATA to one")
    return folder


@pytest.fixture(scope="session")
def chromium() -> Path:
    """A browser that can take a screenshot without a display."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return Path(found)


@pytest.fixture(autouse=True)
def registered_methods() -> Iterator[None]:
    """Methods that a test registers are gone after it: pages and lists count the registered ones."""
    from polyfed.core.method import methods

    methods.names()
    before = dict(methods._records)
    yield
    methods._records.clear()
    methods._records.update(before)
