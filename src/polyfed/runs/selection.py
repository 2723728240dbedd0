"""Which round's model a run ends with: the choices, and the data that choosing needs. The best round is chosen in ``best_round.py``."""

from __future__ import annotations

from polyfed.core.data_types import Federation
from polyfed.errors import DataError

LAST, BEST_VALIDATION, BEST_LOCAL_VALIDATION = "last", "best_validation", "best_local_validation"
BY_VALIDATION = (BEST_VALIDATION, BEST_LOCAL_VALIDATION)
"""Choices that need validation data: scores of the models after averaging, or of those that clients have just trained."""


def require_validation(federation: Federation, selection: str) -> None:
    """Refuse data on which no round can be chosen, before anything is trained."""
    lacking = federation.without_validation()
    if lacking:
        raise DataError(
            f"--selection {selection} chooses a round on validation data, and {lacking}. Use --selection {LAST}, "
            "or data with a validation part (a data set's own option where it has one, such as validation=0.1)."
        )
