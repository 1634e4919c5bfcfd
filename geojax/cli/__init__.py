"""The `geojax` command: a module for each subcommand, which parses, calls and prints."""
