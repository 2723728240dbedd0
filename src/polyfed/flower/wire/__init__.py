"""Messages between server and nodes, and the ways they take."""
