"""Tokens and masks of conversations, beside those of `apply_chat_template`."""

import numpy as np
import pytest
import transformers
from support.chats import CHATML, TALKS, WITH_TAGS, write_tokenizer

from geojax.data.chat import ChatTemplate
from geojax.data.tokenizer import Tokenizer


@pytest.mark.parametrize("template", [WITH_TAGS, CHATML])
@pytest.mark.parametrize("talk", TALKS)
def test_a_conversation_has_the_tokens_and_the_mask_of_transformers(tmp_path, talk, template):
    folder = write_tokenizer(tmp_path)
    (folder / "template.jinja").write_text(template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        talk, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    words = Tokenizer.load(folder / "tokenizer.json")
    ours = ChatTemplate.load(folder / "tokenizer.json", folder / "template.jinja")
    made = ours.conversation(talk, words)
    np.testing.assert_array_equal(made.ids, theirs["input_ids"])
    if template == WITH_TAGS:  # without the tag transformers marks nothing
        np.testing.assert_array_equal(made.of_assistant, theirs["assistant_masks"])
