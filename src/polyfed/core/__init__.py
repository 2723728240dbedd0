"""The core: what a method is, what travels, the client, the server, and the loop. It knows no data set, no model and no method by name."""
