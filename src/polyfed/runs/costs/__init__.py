"""What a run costs: traffic, seconds, memory."""
