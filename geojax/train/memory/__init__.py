"""The memory that a run needs, compared with its devices' before anything is compiled."""
