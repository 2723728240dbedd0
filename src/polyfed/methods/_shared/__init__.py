"""What several methods need. Nothing here is a method, and nothing outside ``methods`` imports it."""
