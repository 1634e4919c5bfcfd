"""Reading of checkpoints: choose one, check it, and bring its arrays onto any layout."""
