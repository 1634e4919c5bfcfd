"""Predicted bytes: what a training step sends over each mesh axis, by formula."""
