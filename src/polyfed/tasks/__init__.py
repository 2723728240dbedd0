"""Tasks: what is learned. One value decides targets, default loss, predictions and measures; one file for each task."""
