"""geojax: train transformers on accelerators that sit in more than one data centre."""
