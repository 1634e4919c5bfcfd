"""Training runs: config, training loop, metrics, report and samples."""
