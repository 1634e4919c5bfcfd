"""A run of layers forwards and backwards, with explicit residuals."""
