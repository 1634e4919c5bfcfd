"""The environment of a process: variables, and its place in a job and among sites."""
