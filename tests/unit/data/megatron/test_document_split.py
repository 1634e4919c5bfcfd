import pytest

from geojax.data.megatron.document_split import document_ranges, parse_split


@pytest.mark.parametrize(
    ("split", "documents", "train", "validation"),
    [
        ("969,30,1", 1000, 969, 999),
        ("1,0,0", 7, 7, 7),
        ("99", 7, 7, 7),
        ("0,1,0", 7, 0, 7),
        # Halves are rounded to even numbers.
        ("1,1", 5, 2, 5),
        ("1,1", 7, 4, 7),
        (" 2.5, 1.25 ,.3", 1000, 617, 926),
    ],
)
def test_documents_are_cut_at_rounded_shares(split, documents, train, validation):
    ranges = document_ranges(parse_split(split), documents)
    assert ranges == (range(train), range(train, validation))


@pytest.mark.parametrize(
    "split", ["", "a", "1,2,3,4", "-1,2", "0,0", "1e3", "nan", "1,,2", "9" * 200]
)
def test_other_texts_are_refused(split):
    with pytest.raises(ValueError, match='"969,30,1" would be right'):
        parse_split(split)
