"""Files and output that a run writes beside its checkpoints: none of them may hold it up."""
