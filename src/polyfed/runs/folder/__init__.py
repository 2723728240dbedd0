"""The files of a run folder: ``run.toml``, ``metrics.jsonl``, ``checkpoint/`` and ``lock``, and how they are written and verified."""
