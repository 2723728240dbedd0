"""How a data set is split among clients."""
