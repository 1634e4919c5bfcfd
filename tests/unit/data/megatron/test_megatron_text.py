"""Tokens of Megatron-LM's files are read in place, and documents begin where the index says."""

import itertools
import shutil
from collections import Counter

import numpy as np
import pytest
from support.indexed_files import CODES, write_indexed

from geojax.data import Corpus, DataSettings, Loader, Tokenizer
from geojax.data.corpus import check_sources
from geojax.data.megatron.megatron_text import MegatronText
from geojax.data.verification import verify
from geojax.errors import UserError
from geojax.settings import validate

DOCUMENTS = [[[5, 6, 7, 1]], [[8], [9, 1]], [[]], [[10, 1]], [[1]], [[11, 12, 13, 14, 1]], [[]]]


@pytest.fixture
def index(tmp_path):
    return write_indexed(tmp_path / "v1.0_text_document.idx", DOCUMENTS)


@pytest.mark.parametrize("dtype", CODES)
def test_windows_are_the_documents_in_the_order_of_the_file(tmp_path, tokenizer_file, dtype):
    text = MegatronText(write_indexed(tmp_path / "a.idx", DOCUMENTS, dtype), tokenizer_file)
    tokens, begins = [], []
    for document in DOCUMENTS:
        ids = list(itertools.chain(*document))
        tokens += ids
        begins += [True, *[False] * (len(ids) - 1)] if ids else []
    count = text.token_count("train")
    assert count == len(tokens)
    assert text.token_count("validation") == 0
    for start, stop in itertools.combinations(range(count + 1), 2):
        window = text.window("train", start, stop)
        assert window.tokens.tolist() == tokens[start:stop]
        assert window.tokens.dtype == np.int32
        assert window.begins.tolist() == begins[start:stop]
        np.testing.assert_array_equal(window.counts, ~window.begins)


def test_the_split_cuts_sequences_as_megatron_does(index, tokenizer_file):
    text = MegatronText(index, tokenizer_file, "1,1,2")
    tokens = list(itertools.chain(*itertools.chain(*DOCUMENTS)))
    train, validation = (
        text.window(split, 0, text.token_count(split)) for split in ("train", "validation")
    )
    assert train.tokens.tolist() == tokens[:5]
    assert validation.tokens.tolist() == tokens[5:7]
    # Behind the first sequence of a document nothing begins.
    assert not validation.begins.any()
    assert text.training_sequences == range(2)


def test_the_prefix_and_both_files_name_the_same_text(index, tokenizer_file):
    paths = [index, index.with_suffix(".bin"), index.with_suffix("")]
    texts = [MegatronText(path, tokenizer_file) for path in paths]
    assert {text.path for text in texts} == {index}
    assert len({text.fingerprint for text in texts}) == 1


def test_the_fingerprint_tells_what_changes_the_batches(index, tokenizer_file, tmp_path):
    text = MegatronText(index, tokenizer_file)
    other = tmp_path / "other"
    other.mkdir()
    for file in (index, index.with_suffix(".bin")):
        shutil.copy(file, other)
    assert MegatronText(other / index.name, tokenizer_file).fingerprint == text.fingerprint
    different = [
        MegatronText(index, tokenizer_file, "1,1"),
        MegatronText(write_indexed(tmp_path / "b.idx", [[[4]], *DOCUMENTS[1:]]), tokenizer_file),
        MegatronText(write_indexed(tmp_path / "c.idx", DOCUMENTS, "int32"), tokenizer_file),
    ]
    tokens = bytearray(index.with_suffix(".bin").read_bytes())
    tokens[0] ^= 1
    (other / index.name).with_suffix(".bin").write_bytes(tokens)
    different.append(MegatronText(other / index.name, tokenizer_file))
    assert len({each.fingerprint for each in [text, *different]}) == 5


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 60_000), ("int32", -1), ("int64", 2**40)])
def test_a_token_that_the_tokenizer_lacks_is_named(tmp_path, tokenizer_file, dtype, token):
    index = write_indexed(tmp_path / "a.idx", [[[3, 4, 5]], [[3, token]]], dtype)
    text = MegatronText(index, tokenizer_file)
    assert text.window("train", 0, 4).tokens.tolist() == [3, 4, 5, 3]
    message = rf"a.bin: holds token {token:,} at position 4, and the tokenizer has \d+ tokens; data"
    with pytest.raises(UserError, match=message):
        text.window("train", 2, 5)
    with pytest.raises(UserError, match=message):
        verify([text])


def test_verification_leaves_nothing_beside_the_files(index, tokenizer_file):
    before = set(index.parent.iterdir())
    verify([MegatronText(index, tokenizer_file, "1,1,2")])
    assert set(index.parent.iterdir()) == before


def settings(tokenizer_file, *sources, **changes):
    content = {"tokenizer": tokenizer_file, "sources": sources, **changes}
    return validate(DataSettings, content, "data")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"tokenizer": None},
            "source 'a' needs tokenizer, the tokenizer.json that made the tokens",
        ),
        ({"sources": [{"name": "a", "builtin": "python-stdlib", "split": "9,1"}]}, "split cuts"),
        ({"sources": [{"name": "a"}]}, "needs one of prepared .*, megatron .* and builtin"),
        ({"sources": [{"name": "a", "megatron": "x", "split": "9;1"}]}, "'9;1' is no list of"),
        (
            {"order": "megatron", "sources": [{"name": "a", "builtin": "python-stdlib"}]},
            "order: megatron requires files of megatron in every source, and 'a' has none",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tokenizer_file, content, message):
    whole = {"tokenizer": tokenizer_file, "sources": [{"name": "a", "megatron": "x"}], **content}
    with pytest.raises(UserError, match=message) as error:
        validate(DataSettings, whole, "data")
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_are_refused_before_the_run(index, tokenizer_file, tmp_path):
    def check(path):
        check_sources(settings(tokenizer_file, {"name": "a", "megatron": path}))

    check(index)
    with pytest.raises(UserError, match=r"nowhere.idx: cannot be read \(.*No such file"):
        check(tmp_path / "nowhere")
    (tmp_path / "folder.idx").mkdir()
    with pytest.raises(UserError, match=r"folder.idx: cannot be read \(folder.idx is no regular"):
        check(tmp_path / "folder.idx")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes long where its header says"):
        check(index)


def test_in_geojax_order_they_are_read_as_prepared_folders(tmp_path, tokenizer_file, left):
    draw = np.random.default_rng(3)
    documents = [[[*draw.integers(2, 250, 20).tolist(), 1]] for _ in range(60)]
    shutil.copy(left.folder / "tokenizer.json", tmp_path)
    corpus = Corpus.open(
        settings(
            tmp_path / "tokenizer.json",
            {
                "name": "a",
                "megatron": write_indexed(tmp_path / "a.idx", documents),
                "split": "9,1",
                "weight": 1,
            },
            {"name": "left", "prepared": left.folder, "weight": 1},
        )
    )
    text = corpus.sources[0].text
    loader = Loader(corpus, sequence_length=10, global_batch_size=2, seed=3)
    assert loader.validation_names == ("a", "left")
    windows = text.token_count("train") // 10
    rows = [loader.batch(step) for step in range(windows)]
    expected = Counter(
        tuple(text.window("train", start, start + 10).tokens.tolist())
        for start in range(0, text.token_count("train") - 10, 10)
    )
    seen = Counter(tuple(tokens.tolist()) for batch in rows for tokens in batch["tokens"])
    assert len(expected & seen) == len(expected)
    (batch,) = itertools.islice(loader.validation("a"), 1)
    held_out = text.window("validation", 0, 11)
    np.testing.assert_array_equal(batch["targets"][0], held_out.tokens[1:])
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_id == 1
