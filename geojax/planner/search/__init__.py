"""Search for the layout in which a model trains fastest on a topology."""
