"""Hugging Face checkpoints: models by their `config.json`, weights in safetensors, both ways."""
