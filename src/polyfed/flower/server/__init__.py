"""The server's side of a run over Flower."""
