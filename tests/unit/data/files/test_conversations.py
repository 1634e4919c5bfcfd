"""Conversations as others write them become the same messages."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from geojax.data.files.conversations import conversation_of
from geojax.data.files.formats import record_file_of
from geojax.data.preparation.file_tokens import columns_of
from geojax.data.settings import PrepareSource
from geojax.errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
]
OPENAI = {"messages": MESSAGES}
SHAREGPT = {
    "id": "x",
    "system": "Be brief.",
    "conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}],
}
ALPACA = {"system": "Be brief.", "instruction": "One?", "input": "", "output": "Two."}


def conversations_of(path, format="auto", text_field=None):
    source = PrepareSource(name="a", files=(str(path),), format=format, text_field=text_field)
    columns = columns_of(path, source)
    names = (*columns.names, *columns.optional)
    file = record_file_of(path, format)
    return [conversation_of(record, columns) for record in file.records(path, names)]


def written(tmp_path, *records, name="a.jsonl"):
    path = tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("record", [OPENAI, SHAREGPT, ALPACA], ids=["openai", "sharegpt", "alpaca"])
def test_a_form_follows_from_the_columns(tmp_path, record, name):
    ((messages, context),) = conversations_of(written(tmp_path, record, name=name))
    assert messages == MESSAGES
    assert context == {}


def test_what_a_table_fills_with_nulls_is_left_out(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    record = {"messages": [{"role": "user", "content": "One?", "tool_calls": None}, call]}
    ((messages, _),) = conversations_of(written(tmp_path, record, name="a.parquet"))
    assert messages == [{"role": "user", "content": "One?"}, call]


def test_calls_and_tools_of_sharegpt(tmp_path):
    record = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"at": "Oslo"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "It rains."},
        ],
        "tools": '[{"name": "weather"}]',
    }
    ((messages, context),) = conversations_of(written(tmp_path, record))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert context == {"tools": [{"name": "weather"}]}


def test_the_history_and_the_input_of_alpaca(tmp_path):
    record = ALPACA | {"input": "1 + 1", "history": [["Zero?", "One."]]}
    ((messages, _),) = conversations_of(written(tmp_path, record))
    assert [message["content"] for message in messages] == [
        *("Be brief.", "Zero?", "One.", "One?\n1 + 1", "Two.")
    ]


def test_a_conversation_may_be_a_text_of_json(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('messages\n"' + json.dumps(MESSAGES).replace('"', '""') + '"\n')
    assert conversations_of(path)[0].messages == MESSAGES


def test_of_several_conversations_the_usual_name_is_taken_or_one_is_named(tmp_path):
    record = {"chosen": MESSAGES, "rejected": MESSAGES[:2], "messages": MESSAGES}
    assert conversations_of(written(tmp_path, record))[0].messages == MESSAGES
    del record["messages"]
    with pytest.raises(UserError, match="has conversations in 'chosen' and 'rejected'; name one"):
        conversations_of(written(tmp_path, record))
    found = conversations_of(written(tmp_path, record), text_field="rejected")
    assert found[0].messages == MESSAGES[:2]


@pytest.mark.parametrize(
    ("record", "format", "message"),
    [
        (OPENAI | {"text": "a"}, "auto", "has both 'text' and conversations in 'messages'"),
        ({"a": 1}, "chat", "no field is a conversation: a list of"),
        (OPENAI, "sharegpt", "no field is a conversation in the form sharegpt"),
        (
            {"conversations": [{"from": "alien", "value": "a"}]},
            "auto",
            "jsonl:1: message 0 is from 'alien'; known are: system, human",
        ),
        ({"conversations": [{"from": "gpt", "value": 1}]}, "auto", "message 0 has no text in"),
        (ALPACA | {"history": [["one"]]}, "auto", "the history is no list of pairs"),
        (ALPACA | {"input": 3}, "auto", "the field 'input' is no text"),
        (OPENAI | {"tools": "{"}, "auto", "'tools' is no valid JSON"),
        ({"messages": [MESSAGES[1], {**MESSAGES[2], "weight": 0}]}, "auto", "has the weight 0"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, record, format, message):
    with pytest.raises(UserError, match=message) as error:
        conversations_of(written(tmp_path, record), format)
    assert "\n" not in str(error.value)


def test_a_conversation_that_is_missing_is_named_by_its_line(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl:2: has no field 'messages'"):
        conversations_of(written(tmp_path, OPENAI, {"text": "a"}))
