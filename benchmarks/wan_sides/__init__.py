"""What `benchmarks/wan.py` is made of: contestants, their workers, and the link between them."""
