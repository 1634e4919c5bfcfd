"""`python -m geojax`: the `geojax` command."""

from geojax.cli.main import main

main()
