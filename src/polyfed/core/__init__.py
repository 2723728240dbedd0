"""The core: methods, messages, the client, the server, and the round loop. It depends on no specific data set, model or method."""
