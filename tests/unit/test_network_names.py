"""Names of sites, hosts and ports, wherever they come from."""

import pydantic
import pytest

from geojax.network_names import Host, HostAndPort, HostPort, SiteName, address_of, is_site_name

GOOD_SITES = ["east", "dc-1", "_a", "A_b-9", "x" * 63]
BAD_SITES = [
    *(
        "",
        "-1",
        "-x",
        "12",
        "\uff12",
        "a\uff12",
        ".",
        "..",
        "../../esc",
        "a/b",
        "a.b",
        " west",
        "west ",
    ),
    *("x;touch y", "$(x)", "a\nb", "a\n", "ö", "x" * 64, "x" * 5000),
]


def checked(kind, value):
    return pydantic.TypeAdapter(kind).validate_python(value)


@pytest.mark.parametrize("name", GOOD_SITES)
def test_a_site_has_a_name_of_letters_and_digits(name):
    assert checked(SiteName, name) == name
    assert is_site_name(name)


@pytest.mark.parametrize("name", BAD_SITES)
def test_what_is_no_name_of_a_site_is_refused(name):
    assert not is_site_name(name)
    with pytest.raises(pydantic.ValidationError, match="is no name of a site; give 1 to 63") as e:
        checked(SiteName, name)
    assert len(str(e.value.errors()[0]["msg"])) < 300


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("east1:61440", "east1", 61440),
        ("geojax-east-0-0.geojax:1", "geojax-east-0-0.geojax", 1),
        ("a_b.c.:65535", "a_b.c.", 65535),
        ("10.0.0.1:6000", "10.0.0.1", 6000),
        ("[fd00:0::1]:6000", "fd00::1", 6000),
        ("[fe80::1%eth0]:6000", "fe80::1%eth0", 6000),
    ],
)
def test_a_host_and_a_port_are_read_and_written(text, host, port):
    assert HostPort.parse(text) == (host, port)
    assert HostPort.parse(str(HostPort.parse(text))) == (host, port)
    assert checked(Host, host) == host


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("localhost", "is no host:port"),
        (":5000", "is no host:port"),
        ("localhost:", "its port is no number from 1 to 65535"),
        ("localhost:99999", "its port is no number from 1 to 65535"),
        ("localhost:0", "its port is no number"),
        ("localhost:-1", "its port is no number"),
        ("localhost:٣٣٣٣", "its port is no number"),
        ("localhost:5000\n", "its port is no number"),
        ("127.0.0.1:5:6", "an IPv6 address goes in brackets"),
        ("::1:5000", "an IPv6 address goes in brackets"),
        ("[::1:5000", "an IPv6 address goes in brackets"),
        ("[::1:]:5000", "is no IPv6 address"),
        ("[east]:5000", "is no IPv6 address"),
        ("..:5000", "is no host's name"),
        (f"{'x' * 64}.org:5000", "is no host's name"),
        (f"{'x.' * 127}y:5000", "is no host's name"),
        ("$(x):5", "is no host's name"),
        ("-x:5", "is no host's name"),
        ("a b:5", "is no host's name"),
        ("ö.org:5", "is no host's name"),
        ("1.2.3:5", "is no IPv4 address"),
        ("127.1:5", "is no IPv4 address"),
        ("256.0.0.1:5", "is no IPv4 address"),
    ],
)
def test_what_is_no_host_and_port_is_refused(text, problem):
    with pytest.raises(pydantic.ValidationError) as error:
        checked(HostAndPort, text)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("127.0.0.1:5", "is neither a host's name nor its address; give one without a port"),
        ("127.0.0.1\n", "is no host's name"),
        ("1.2.3", "is no IPv4 address"),
        ("127.1", "is no IPv4 address"),
        ("", "is no host's name"),
    ],
)
def test_what_is_no_host_is_refused(host, problem):
    with pytest.raises(pydantic.ValidationError) as error:
        checked(Host, host)
    assert problem in str(error.value)


def test_a_name_is_resolved_to_an_ipv4_address_first():
    assert address_of("localhost") == "127.0.0.1"
    assert address_of("fd00::1") == "fd00::1"
