"""Published step times, and what the frameworks that they are of do."""
