"""Names of the files and folders of a run directory."""

CONFIG = "config.yaml"
STEP = "step.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
GOODPUT = "goodput.jsonl"
GOODPUT_NOW = "goodput-now.json"
LOSS_CURVE = "loss.png"
SAMPLES = "sample.txt"
LOCK = "lock"

CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers"
PROFILE = "profile"

FOLDERS = (CHECKPOINTS, TENSORBOARD, TRACKERS, PROFILE)
"""Folders of a run; with islands each site has one more, by its name."""
