"""Islands that go on without a site that is lost: who takes part, and what each of them computes.

`site_membership` calls the transition function of `geojax.membership` and does what it says.
`member_transport` is the transport to the sites that take part, and `steps` does a step again.
"""
