"""Which round's model a run ends with: the choices, and the data that choosing needs. The best round is chosen in ``best_round.py``."""

from __future__ import annotations

from polyfed.core.data_types import Federation
from polyfed.errors import DataError
from polyfed.settings import BY_VALIDATION, Settings

LAST = "last"
BEST_VALIDATION, BEST_LOCAL_VALIDATION = BY_VALIDATION


def require_validation(federation: Federation, settings: Settings) -> None:
    """Refuse data on which no round can be chosen, or the run be stopped, before anything is trained."""
    if settings.needs_validation:
        need, instead = f"--selection {settings.selection} chooses a round on validation data", f"Use --selection {LAST}"
    elif settings.patience:
        need, instead = f"--early-stopping {settings.early_stopping} goes by validation data", "Leave it out"
    else:
        return
    if lacking := federation.without_validation():
        raise DataError(
            f"{need}, and {lacking}. {instead}, "
            "or data with a validation part (a data set's own option where it has one, such as validation=0.1)."
        )
