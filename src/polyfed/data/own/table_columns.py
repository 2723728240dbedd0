"""The columns of a table of images: which are used, and which one contains the groups (patients) that are never split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from polyfed.data.declaration import DataOption
from polyfed.errors import DataError
from polyfed.settings import AUTO

GROUP = "group"
UNCHECKED = "unchecked"
"""Value of the option ``group`` for the data of an existing run: like ``auto``, but without the check, which the run may predate."""
LIKELY = (
    "patient",
    "subject",
    "participant",
    "person",
    "individual",
    "case",
    "study",
    "exam",
    "examination",
    "encounter",
    "accession",
    "mrn",
    "lesion",
    "specimen",
    "slide",
    "series",
    "session",
    "donor",
    "animal",
    "writer",
    "speaker",
    "group",
)
"""Words that name groups. The first are suggested first."""
_GROUP_NAME = re.compile(rf"({'|'.join(LIKELY)})s?(instance)?(id|ids|uid|identifier|number|num|no|nr|code|key|name|index)?")

group_option = DataOption(
    GROUP,
    AUTO,
    "Column of groups (patients), which are never split. auto: the column group, if no other column looks like one. Empty: none.",
)


def choose_group(
    where: str, asked: str, columns: Mapping[str, Callable[[], Sequence[str]]], default: str, used: Iterable[str], reader: str
) -> str:
    """Return the column of groups; empty for none. Reject a table if it is likely that groups would be split unnoticed.

    Args:
        where: File name for error messages.
        asked: Value of the option ``group``.
        columns: Function that returns the values of each column.
        default: Column that ``auto`` uses if it exists; empty for none.
        used: Columns with other uses.
        reader: Expression that reads such data, up to its first option, for error messages.
    """
    if asked not in (AUTO, UNCHECKED):
        return asked
    if default in columns or asked == UNCHECKED:
        return default if default in columns else ""
    ranks = {name: rank for name in columns if name not in set(used) and (rank := _likelihood(name)) is not None}
    likely = sorted((name for name in ranks if _repeats(columns[name]())), key=ranks.__getitem__)
    if not likely:
        return ""
    named = f"the column{'s' * (len(likely) > 1)} {', '.join(likely)}"
    call = reader.replace('"TABLE"', f'"{where}"').replace('"FOLDER"', f'"{where}"')
    raise DataError(
        f"{where} has {named}, and images of one {likely[0]} could be in both training and test data, which inflates the scores. Pass "
        f'the data as \'{call}, group="{likely[0]}")\' to keep them together, or with group="" to ignore the column.'
    )


def unused_columns(where: str, columns: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """Return a notice that lists the columns that are not used, if there are any."""
    unused = [name for name in columns if name and name not in set(used)]
    return (f"{where}: unused column{'s' * (len(unused) > 1)}: {', '.join(unused)}.",) if unused else ()


def _likelihood(name: str) -> int | None:
    """Return the position in ``LIKELY`` of the word that a column is named after, or None.

    >>> _likelihood("Patient_ID"), _likelihood("lesion_id"), _likelihood("patient_age")
    (0, 12, None)
    """
    found = _GROUP_NAME.fullmatch(re.sub(r"[^a-z0-9]", "", name.lower()))
    return None if found is None else LIKELY.index(found[1])


def _repeats(values: Sequence[str]) -> bool:
    """Return True if two images have the same value, so that they could be separated."""
    filled = [value for value in values if value]
    return len(set(filled)) < len(filled)
