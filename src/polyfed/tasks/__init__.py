"""Tasks, one per file. A task defines targets, default loss, predictions and metrics."""
