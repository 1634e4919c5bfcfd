"""The `geojax` command: one small module a verb, which parses, calls and prints."""
