"""Which round's model a run ends with: the choices, and the data that choosing needs. The best round is chosen in ``best_round.py``."""

from __future__ import annotations

from polyfed.core.data_types import Federation
from polyfed.errors import DataError
from polyfed.settings import BY_VALIDATION

LAST = "last"
BEST_VALIDATION, BEST_LOCAL_VALIDATION = BY_VALIDATION


def require_validation(federation: Federation, selection: str) -> None:
    """Refuse data on which no round can be chosen, before anything is trained."""
    lacking = federation.without_validation()
    if lacking:
        raise DataError(
            f"--selection {selection} chooses a round on validation data, and {lacking}. Use --selection {LAST}, "
            "or data with a validation part (a data set's own option where it has one, such as validation=0.1)."
        )
