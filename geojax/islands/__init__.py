"""Sites as JAX runtimes of their own, joined by a transport: the second way to join sites.

Every site has its own mesh, without `dc`. A host loop walks a list of actions and dispatches the
programs of chunks one after the other; what crosses between sites goes through a
`geojax.transport.Transport`.
"""
