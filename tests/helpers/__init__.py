"""What several test files use; ``pythonpath`` in pyproject.toml makes it importable as ``helpers``."""
