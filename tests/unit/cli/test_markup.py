"""Text becomes markup only where it is escaped."""

from geojax.cli.markup import Markup, element, joined


def test_text_and_attributes_are_escaped():
    child = element("b", "<i>&\x1b\u202e", class_='"><script>')
    assert child == ('<b class="&quot;&gt;&lt;script&gt;">&lt;i&gt;&amp;\\x1b\\u202e</b>')
    assert element("p", child, "<") == f"<p>{child}&lt;</p>"


def test_attributes():
    assert element("g", stroke_width=1.25, x=2.0, y=3, fill=None) == (
        '<g stroke-width="1.2" x="2" y="3"></g>'
    )


def test_joined_text_is_escaped():
    assert joined("<", Markup("<br>")) == "&lt;<br>"
