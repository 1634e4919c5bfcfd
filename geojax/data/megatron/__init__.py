"""Files of Megatron-LM that are trained on in place, and the order of its samples."""
