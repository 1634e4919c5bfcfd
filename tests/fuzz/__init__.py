"""A seeded fuzz of the `geojax` command: bad input ends in one line, at once, and leaves nothing.

    PYTHONPATH=tests python -m fuzz --cases 2000        # from the repository

A case is a command line, environment variables and files, mutated from the shipped configs and from
every field by its type and bounds (`fuzz.cases`). It runs in a process forked from one that has
imported geojax and started no backend (`fuzz.server`), up to where a command would compile, start
processes or change the machine (`fuzz.boundary`).
"""
