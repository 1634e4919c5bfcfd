"""`geojax report` writes one page that loads nothing and in which nothing of a run is markup."""

import html.parser
import json
import re
import xml.etree.ElementTree

import pytest
import yaml
from support.synthetic_runs import CONFIG, PLANNED, write_run

from geojax.cli.main import run
from geojax.exit_codes import USAGE

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'>\x1b\u202e"
VOID = ("meta",)


class Page(html.parser.HTMLParser):
    """The elements, attributes and text of a page, of which every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = set(), set(), [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def report(*arguments):
    assert run(["report", *map(str, arguments)]) == 0


def check_harmless(text):
    page = Page(text)
    assert page.tags.isdisjoint(("script", "img", "link", "iframe", "object", "a", "base", "form"))
    assert not [name for name in page.attributes if name.startswith("on")]
    assert page.attributes.isdisjoint(("href", "src", "style", "xlink:href", "srcset"))
    assert "default-src 'none'" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    for svg in re.findall(r"<svg.*?</svg>(?!<)", text, re.DOTALL):
        assert "nan" not in re.sub(r"<title>.*?</title>|<text.*?</text>", "", svg)
    body = text[text.index("<body>") : text.index("</html>")]
    xml.etree.ElementTree.fromstring(body)
    return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    return write_run(folder / "first"), write_run(folder / "second", seed=3, islands=False)


def test_a_page_of_one_run(tmp_path, runs, capsys):
    output = tmp_path / "out.html"
    report(runs[0], "--output", output)
    assert str(output) in capsys.readouterr().out
    page = check_harmless(output.read_text())
    for words in (
        "(step 905): process 3 (site west) is 0.9 s later than the others",
        *("2,000 of 2,000", "validation books, step 2,000", "median MFU", "goodput"),
        *("hours since the first start", "seconds a step, mean of each part", "round trip, ms"),
        *("1: killed", "3: end", "failed save (1)", "save (", "Plan against measurement"),
        *("productive", "recomputed", "unattributed", "↳ for west", "median step", "7.1 s"),
        *("62 GB of 80 GB", "Changes over a restart", "optimizer.peak_learning_rate"),
        *("0.0004", "NVIDIA H100", "2 min", "steps"),
    ):
        assert words in page.text, words
    assert output.stat().st_size < 500_000


def test_two_runs_side_by_side(tmp_path, runs):
    other = runs[1] / "config.yaml"
    other.write_text(yaml.safe_dump(CONFIG | {"precision": "fp8-current"}))
    output = tmp_path / "out.html"
    report(*runs, "--output", output)
    page = check_harmless(output.read_text())
    for words in ("first against second", "difference", "What differs", "fp8-current"):
        assert words in page.text, words
    assert "first training" in page.text
    assert "second training" in page.text


def test_nothing_of_a_run_becomes_markup(tmp_path):
    folder = tmp_path / "<script>alert(2)<script>"
    folder.mkdir()
    line = {"loss": 2.0, "seconds": 1e99, "time": 1e99, f"validation/{HOSTILE}": 2.0}
    line |= {
        f"link/w/{HOSTILE}": 1,
        f"link/{HOSTILE}/wait_seconds": 1,
        "link/w/wait_seconds": -1e99,
    }
    text = "".join(json.dumps({"step": step} | line) + "\n" for step in (1, 2, 10**15))
    (folder / "metrics.jsonl").write_text(text + HOSTILE + "\n")
    config = {
        "steps": HOSTILE,
        HOSTILE: HOSTILE,
        "mesh": {HOSTILE: HOSTILE},
        "precision": [HOSTILE],
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "config.1.yaml").write_text(json.dumps({HOSTILE: 1}))
    event = {"kind": HOSTILE, "text": HOSTILE, "time": 5.0, "step": 1}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    attempt = {"attempt": 1, "began": -1e99, "ended": 5.0, "outcome": HOSTILE}
    attempt |= {"seconds": {"productive": 1e99, HOSTILE: 1}, "waiting_for": {HOSTILE: 1, "w": 2}}
    (folder / "goodput.jsonl").write_text(json.dumps(attempt) + "\n")
    planned = PLANNED | {"notes": [HOSTILE], "memory": {"line": HOSTILE}}
    planned["origin"] = {"geojax": HOSTILE, "devices": [{"kind": HOSTILE, "count": HOSTILE}]}
    (folder / "step.yaml").write_text(yaml.safe_dump(planned))
    report(folder, "--output", tmp_path / "out.html")
    page = check_harmless((tmp_path / "out.html").read_text())
    assert "alert(1)" in page.text
    assert "that are no records and were left out: 1." in page.text


def test_an_older_run(tmp_path):
    lines = [{"step": 0, "validation/sums": 5.7}, {"step": 1, "loss": 5.6, "seconds": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    report(tmp_path, "--output", tmp_path / "out.html")
    page = check_harmless((tmp_path / "out.html").read_text())
    assert "Goodput: not recorded." in page.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "0 directories"),
        (["a", "b", "c"], "3 directories"),
        (["none"], "no metrics.jsonl with a step"),
        (["first", "--output", "."], "is no file"),
        (["first", "--output", "/dev/null"], "is no file"),
        (["first", "--output", "none/x.html"], "cannot be written"),
    ],
)
def test_what_makes_no_page(runs, capsys, monkeypatch, arguments, expected):
    monkeypatch.chdir(runs[0].parent)
    assert run(["report", *arguments]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
