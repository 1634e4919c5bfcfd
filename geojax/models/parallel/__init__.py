"""How one model is spread over the ranks that share it."""
