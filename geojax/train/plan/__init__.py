"""The plan of a run, made of its settings: layout, pipeline, link, and what the planner says."""
