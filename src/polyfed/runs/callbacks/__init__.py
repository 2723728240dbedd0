"""Callbacks of a run: metrics, evaluation, round selection, early stopping, checkpoints, progress, trackers, and your own."""
