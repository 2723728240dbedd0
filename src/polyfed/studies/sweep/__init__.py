"""Search for settings on source validation data, with the same budget for every method."""
