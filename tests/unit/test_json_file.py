import pytest

from geojax.errors import UserError
from geojax.json_file import load_json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, r"not valid JSON \(objects or lists too deep\)"),
        (b"{", "not valid JSON"),
        (b'{"a": ' + b"9" * 9999 + b"}", "not valid JSON"),
        (b"[1]", "expected a JSON object, found a list"),
        (b"\xff", r"not UTF-8 text \(byte 0xff\)"),
    ],
)
def test_what_is_no_object_is_refused_in_a_line(content, message, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_json(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_not_regular_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_json(tmp_path / "file.json")
    with pytest.raises(UserError, match="must be a regular file"):
        load_json(tmp_path)
