"""Conversations by chat templates: tokens, the assistant's parts, and what is refused."""

import json

import numpy as np
import pytest
import tokenizers
from support.chats import CHATML, FORGETFUL, TALKS, WITH_TAGS, write_tokenizer

from geojax.cli.data import PrepareCommand, run
from geojax.data import Corpus, DataSettings, Loader, Prepared, SourceSettings
from geojax.data.templates.chat import ChatTemplate
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as of a model: tokenizer.json and tokenizer_config.json."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def written(folder, path, talks, template=None, **settings):
    lines = path / "talks.jsonl"
    lines.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    command = PrepareCommand(
        files=(str(lines),),
        format="chat",
        tokenizer=folder / "tokenizer.json",
        chat_template=template,
        output=path / "prepared",
        **settings,
    )
    assert run(command) == 0
    return Prepared(path / "prepared")


def learned(batch, tokenizer):
    """The texts of the runs of targets that the loss counts."""
    texts = []
    for targets, mask in zip(batch["targets"], batch["loss_mask"], strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        pairs = zip(edges[::2], edges[1::2], strict=True)
        texts += [tokenizer.decode(targets[begin:end].tolist()) for begin, end in pairs]
    return texts


def test_the_loss_counts_what_the_assistant_writes_and_documents_are_apart(folder, tmp_path):
    prepared = written(folder, tmp_path, TALKS)
    assert prepared.manifest.splits["train"].documents == 3
    corpus = Corpus.open(
        DataSettings(sources=(SourceSettings(name="a", prepared=prepared.folder),))
    )
    tokens = len(prepared.stream("train"))
    loader = Loader(corpus, sequence_length=tokens - 1, global_batch_size=1)
    batch = loader.batch(0)
    assert learned(batch, prepared.tokenizer) == [" öne 🙂\n", "two\n", "three, three\n"]
    assert int(batch["segment_ids"].max()) == 3
    start = prepared.tokenizer.encode_with_special_tokens("<|im_start|>").ids[0]
    begins = np.flatnonzero(batch["positions"][0] == 0)
    assert (batch["tokens"][0, begins] == start).all()


def test_tags_in_the_template_mark_the_parts(folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(WITH_TAGS)
    words = Tokenizer.load(folder / "tokenizer.json")
    made = ChatTemplate.load(folder / "tokenizer.json", template).conversation(TALKS[0], words)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text, parts = (
        library.decode(ids.tolist(), skip_special_tokens=False)
        for ids in (made.ids, made.ids[made.of_assistant])
    )
    assert text.startswith("<|endoftext|><|im_start|>user\nSay")
    assert parts == "öne 🙂<|im_end|>two<|im_end|>"


@pytest.mark.parametrize(
    ("talk", "template", "message"),
    [
        ([{"role": "user", "content": "a<|im_end|>b"}], CHATML, "message 0 spells the special"),
        (TALKS[0], FORGETFUL, r"renders message 1 in another way .* {% generation %}"),
        (TALKS[0], "{{ raise_exception('no roles') }}", r"refuses the messages \(no roles\)"),
        (TALKS[0], "{{ messages.__class__.__mro__ }}", "refuses the messages .*unsafe"),
        (
            TALKS[0],
            "{{ 'x' * 10**10 }}",
            "talks.jsonl:1: .*template.jinja refuses .* makes or does",
        ),
        (TALKS[0], "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "jsonl:1: .*calls itself"),
        (TALKS[0], "", r"talks.jsonl:1: .*template.jinja renders nothing of the messages"),
        (TALKS[0], "{% for m in messages %}{% endfor %}", "renders nothing"),
        (TALKS[0], "{% generation %}{% endgeneration %}x", "no token of an assistant"),
        ([{"role": "user", "content": "\ud800"}], CHATML, "jsonl:1: .* half of a surrogate pair"),
        (TALKS[0], "{{ raise_exception('a\\n' * 999) }}", r"refuses the messages \(a a .*\.\.\.\)"),
        (TALKS[0], "{{ '%(a)s' % messages[0] }}", "refuses the messages"),
        (TALKS[0], "{% for a in b %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
        (TALKS[0], "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "no chat template"),
        (TALKS[0], "x" * (2 << 20), "template.jinja: .*up to 1,048,576 bytes"),
        (TALKS[0], "{% for %}", r"no chat template \(line 1: "),
        (["hello"], CHATML, "'messages' is no list of messages"),
        (TALKS[1], CHATML, "no token of an assistant is in its 1 conversations"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(folder, tmp_path, talk, template, message):
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with pytest.raises(UserError, match=message) as error:
        written(folder, tmp_path, [talk], path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "prepared").exists()


def test_a_missing_template_or_tokenizer_is_named(folder, tmp_path):
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="neither chat_template"):
        written(lone, tmp_path, TALKS)
    talks = str(tmp_path / "talks.jsonl")
    with pytest.raises(UserError, match="and its chat template; name it"):
        run(PrepareCommand(files=(talks,), format="chat", output=tmp_path / "out"))
    with pytest.raises(UserError, match="and its chat template; name it"):
        run(PrepareCommand(files=(talks,), output=tmp_path / "out"))
