"""Messages between server and nodes, and their transport."""
