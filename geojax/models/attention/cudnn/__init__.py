"""cuDNN's flash attention, for NVIDIA GPUs."""
