"""Files of a run folder: ``run.toml``, ``metrics.jsonl``, ``checkpoint/`` and ``lock``, with atomic writes and verification."""
