"""Output that cannot be written holds up nobody, and what is missing is told."""

import os

from geojax.train.writing.console import run_console


def test_lines_come_in_order(capfd):
    with run_console(quiet=False) as console:
        for number in range(20):
            console.print(f"line {number}")
    assert capfd.readouterr().out.splitlines() == [f"line {number}" for number in range(20)]


def test_a_full_disk_behind_the_output_is_told_when_it_has_space(capfd, monkeypatch):
    write = os.write

    def limited(descriptor, content):
        if content.startswith((b"lost", b"\nwarning")) and b"last" not in content:
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr("geojax.train.writing.console.os.write", limited)
    with run_console(quiet=False) as console:
        console.print("first")
        console.print("lost one")
        console.print("lost two")
        console.print("last")
    lines = capfd.readouterr().out.splitlines()
    missing = "warning: 2 pieces of the output are missing here"
    assert [line for line in lines if line] == ["first", missing, "last"]


def test_a_quiet_console_says_nothing(capfd):
    with run_console(quiet=True) as console:
        console.print("nobody reads this")
    assert capfd.readouterr().out == ""
