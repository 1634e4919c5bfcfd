"""A seeded fuzz of the `geojax` command: bad input ends in one line, at once, and leaves nothing.

    PYTHONPATH=tests python -m fuzz --cases 2000        # from the repository

A case is a command line, environment variables and files, drawn for one of the surfaces
(`fuzz.surfaces`) from shipped configs and from small runs, data and weights (`fuzz.corpus`). It
runs in a process forked from one that has imported geojax and started no backend (`fuzz.server`),
up to where a command would compile, start processes or change the machine (`fuzz.boundary`).
"""
