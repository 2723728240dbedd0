"""Ways to deliver an ask to clients on this machine."""
