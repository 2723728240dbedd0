"""Server side of a run over Flower."""
