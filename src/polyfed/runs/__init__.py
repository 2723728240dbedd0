"""The life of a run: assembled from settings, trained, recorded in a folder, checkpointed, resumed, opened again, compared."""
