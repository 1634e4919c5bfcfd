"""A parameter's name stands in its module; what is known of it goes by its declaration."""

from support.parameter_names import hits, parameter_names


def test_names_of_parameters_stand_in_their_modules_alone():
    names = parameter_names()
    assert {"kernel", "scale", "embedding", "experts", "dense_layers"} - names == {"embedding"}
    assert not list(hits(names))
