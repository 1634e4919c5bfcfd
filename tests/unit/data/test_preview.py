"""A preview shows what a run reads, and the text of every token of any tokenizer."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from geojax.data import Corpus, Loader, Source, Tokenizer
from geojax.data.preview import (
    DocumentSpan,
    TokenTexts,
    batch_figures,
    source_figures,
    summarized_sequences,
    training_sequences,
    validation_sequences,
)

SEQUENCE, BATCH = 32, 8


@pytest.fixture
def mixed(two_prepared):
    left, right = two_prepared
    return Corpus((Source("left", left, 0.75), Source("right", right, 0.25)))


def loader_of(corpus):
    return Loader(corpus, sequence_length=SEQUENCE, global_batch_size=BATCH, seed=3)


def test_sequences_are_those_of_the_batch_and_lie_where_they_say(mixed):
    loader = loader_of(mixed)
    prepared = {source.name: source.text for source in mixed.sources}
    batch = loader.batch(4)
    shown = training_sequences(loader, 4, batch, 99)
    assert [sequence.number for sequence in shown] == list(range(4 * BATCH, 5 * BATCH))
    assert {sequence.source for sequence in shown} == {"left", "right"}
    for row, sequence in enumerate(shown):
        assert sequence.arrays.keys() == batch.keys() - {"row"}
        for name, values in sequence.arrays.items():
            np.testing.assert_array_equal(values, batch[name][row])
        stream = prepared[sequence.source].stream("train")
        tokens = stream.read(sequence.start, sequence.start + SEQUENCE + 1).tolist()
        assert sequence.with_last_target == tokens
        bos = mixed.tokenizer.bos_id
        assert sequence.begins_document == (tokens[0] == bos)
        assert sequence.is_counted == [False, *(token != bos for token in tokens[1:])]


def test_documents_cover_a_sequence(mixed):
    loader = loader_of(mixed)
    batch = loader.batch(0)
    for sequence in training_sequences(loader, 0, batch, BATCH):
        documents = sequence.documents
        assert [document.segment for document in documents] == list(range(1, len(documents) + 1))
        assert sum(document.tokens for document in documents) == SEQUENCE
        assert documents[0].start == 0
        for document in documents:
            positions = sequence.arrays["positions"][document.start : document.stop]
            np.testing.assert_array_equal(positions, np.arange(document.tokens))


def test_padding_is_a_span_of_segment_0(mixed):
    *_, last = loader_of(mixed).validation("left")
    shown = validation_sequences("left", 2, BATCH, last, 99)
    assert 0 < len(shown) < BATCH, "sequences that are all padding are left out"
    assert shown[0].number == 2 * BATCH
    end = shown[-1].documents[-1]
    assert end == DocumentSpan(0, end.start, SEQUENCE)
    figures = batch_figures(last)
    assert (figures.sequences, figures.padding) == (len(shown), end.tokens)


def test_figures_of_a_batch():
    batch = {
        "segment_ids": np.asarray([[1, 1, 2, 2], [1, 1, 1, 0], [0, 0, 0, 0]]),
        "loss_mask": np.asarray([[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]),
    }
    assert batch_figures(batch) == (2, 4, 6, 1, 3)


def test_figures_of_sources_tell_epochs_where_the_steps_are_known(two_prepared, mixed):
    left, _ = two_prepared
    windows = (len(left.stream("train")) - 1) // SEQUENCE
    first, second = source_figures(mixed, SEQUENCE, 1000)
    assert (first.name, first.share, second.share) == ("left", 0.75, 0.25)
    assert first.epochs == pytest.approx(750 / windows)
    assert first.text.documents == left.manifest.splits["train"].documents
    assert first.tokens == len(left.stream("train"))
    assert first.validation_tokens == len(left.stream("validation"))
    assert not first.text.are_conversations
    tokens = first.tokens + first.validation_tokens
    assert first.text.bytes_per_token == pytest.approx(left.manifest.text_bytes / tokens)
    assert source_figures(mixed, SEQUENCE, None)[0].epochs is None


@pytest.mark.parametrize(
    ("length", "batch", "shown", "read"),
    [(128, 8, 1, 8), (8192, 4096, 1, 512), (8192, 4096, 1000, 1000), (1 << 28, 4, 1, 1)],
)
def test_of_a_large_batch_a_part_is_summarized(length, batch, shown, read):
    assert summarized_sequences(length, batch, shown) == read


def test_a_line_of_json_has_every_array_and_text(mixed):
    loader = loader_of(mixed)
    (sequence,) = training_sequences(loader, 0, loader.batch(0), 1)
    content = json.loads(json.dumps(sequence.to_json(TokenTexts(mixed.tokenizer))))
    arrays = ["tokens", "targets", "loss_mask", "segment_ids", "positions"]
    assert content.keys() == {"number", "source", "start", "texts", *arrays}
    for name in arrays:
        np.testing.assert_array_equal(content[name], sequence.arrays[name])
    assert len(content["texts"]) == SEQUENCE
    assert set(content["source"]) <= set("leftright")


BYTE_LEVEL = Tokenizer.train(["öne two \x1b[31m", "öne two"], vocabulary_size=265)


def texts_of(tokenizer, text):
    texts = TokenTexts(tokenizer)
    return [texts.text(token) for token in tokenizer.encode(text)]


def test_bytes_of_a_part_of_a_character_are_named():
    assert texts_of(BYTE_LEVEL, "é") == ["<0xC3>", "<0xA9>"]
    assert texts_of(BYTE_LEVEL, "🙂") == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert "".join(texts_of(BYTE_LEVEL, "öne two\x1b\r\n ")) == "öne two\x1b\r\n "


def test_special_and_unknown_tokens():
    texts = TokenTexts(BYTE_LEVEL)
    assert texts.text(BYTE_LEVEL.bos_id) == "<|begin|>"
    assert texts.is_special(BYTE_LEVEL.bos_id)
    assert not texts.is_special(BYTE_LEVEL.encode("a")[0])
    assert texts.text(10**6) == "<no token>"


def test_texts_of_a_vocabulary_of_characters_with_byte_fallback():
    """As SentencePiece has it: a mark for a space, and é is a character, not the byte 0xE9."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "a", "b", "é", "▁b", "Ġ"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: number for number, name in enumerate(names)},
            merges=[("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    words = Tokenizer(backend.to_str().encode(), source="test")
    assert texts_of(words, "a b éĠ") == [" ", "a", " b", " ", "é", "Ġ"]
    assert texts_of(words, "ü")[-2:] == ["<0xC3>", "<0xBC>"]
    assert TokenTexts(words).text(words.bos_id) == "<s>"
