"""Conversations, chat templates, and the files of a tokenizer that knows their special tokens."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITH_TAGS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' }}
    {%- endif %}
{%- endfor %}"""
FORGETFUL = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
TALKS = [
    [
        {"role": "user", "content": "Say öne."},
        {"role": "assistant", "content": " öne 🙂"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "two"},
    ],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "only a question"}],
    [{"role": "user", "content": "three"}, {"role": "assistant", "content": "three, three"}],
]


def write_tokenizer(folder: Path) -> Path:
    """Write the files of a tokenizer as a model's folder has them, and return the folder."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["one two three assistant user"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHATML,
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
