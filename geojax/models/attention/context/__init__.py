"""Context parallelism: attention of sequences that the ranks of `context` share."""
