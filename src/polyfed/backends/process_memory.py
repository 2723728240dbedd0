"""The resident memory of this process, as the system reports it (Linux only)."""

from __future__ import annotations

from pathlib import Path

STATUS, CLEAR, MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
RESET_PEAK = "5"


def resident_size() -> int | None:
    """Return the bytes of memory that this process uses; None if the system does not report them."""
    return _bytes_in(STATUS, "VmRSS:")


def peak_size() -> int | None:
    """Return the peak memory in bytes since the last ``reset_peak``; None if the system does not report it."""
    return _bytes_in(STATUS, "VmHWM:")


def private_size() -> int | None:
    """Return the memory of this process in bytes, without mapped files such as libraries, which processes share."""
    return _without_files(resident_size())


def private_peak() -> int | None:
    """Return the peak of ``private_size`` since the last ``reset_peak``."""
    return _without_files(peak_size())


def available_memory() -> int | None:
    """Return the bytes that new processes of this machine can use; None if the system does not report them."""
    return _bytes_in(MACHINE, "MemAvailable:")


def reset_peak() -> bool:
    """Reset the peak to the current size; return False if the system does not support it."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _without_files(size: int | None) -> int | None:
    return None if size is None else size - (_bytes_in(STATUS, "RssFile:") or 0)


def _bytes_in(file: Path, field: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
