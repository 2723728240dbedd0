"""What observes a run while it trains: metrics, evaluation, selection, early stopping, checkpoints, progress, trackers, your callbacks."""
