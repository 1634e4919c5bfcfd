"""Keys of any `config.json` that leave the logits as they are, and values that they may have."""

from collections.abc import Callable, Mapping
from typing import Any

from geojax.errors import UserError
from geojax.json_file import shown


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_token(value: Any) -> bool:
    """Return True for a token's number; -1, as in early Llama checkpoints, is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1


def _are_tokens(value: Any) -> bool:
    return _is_token(value) or (
        isinstance(value, list) and value != [] and all(map(_is_token, value))
    )


_CHECKED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (_is_text, "the name of a dtype"),
    "torch_dtype": (_is_text, "the name of a dtype"),
    "bos_token_id": (_are_tokens, "a token's number"),
    "eos_token_id": (_are_tokens, "a token's number, or a list of them,"),
    "pad_token_id": (_is_token, "a token's number"),
    "unk_token_id": (_is_token, "a token's number"),
}
"""Checks of keys that other programs act on, and what they want."""

NEUTRAL_KEYS = frozenset(
    {"architectures", "model_type", "transformers_version", "use_cache", "auto_map"}
    | {"id2label", "label2id", "problem_type", "task_specific_params", "tokenizer_class"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
    | {"_attn_implementation", "_attn_implementation_autoset", "_name_or_path"}
    | {"chunk_size_feed_forward", "is_encoder_decoder", "transformers.js_config"}
    | _CHECKED.keys()
)
"""Keys of any `config.json` that leave the logits as they are."""


def refuse_wrong_values(content: Mapping[str, Any], source: str) -> None:
    """Refuse special tokens that are no numbers, and dtypes that are no names.

    Raises:
        UserError: a key of the `config.json` called `source` has such a value.
    """
    for key, (is_right, wanted) in _CHECKED.items():
        value = content.get(key)
        if value is not None and not is_right(value):
            raise UserError(f"{source}: {key} is {shown(value)}; {wanted} would do")
