"""Advice on settings of hosts and of NCCL for the links between sites."""
