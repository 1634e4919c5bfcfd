"""The folder of a model as the Hugging Face hub has it, or what `save_pretrained` writes.

`tokenizer.json` comes first, as in `transformers`. An older folder has `vocab.json` with
`merges.txt`, or a SentencePiece model. Programs in the folder are not run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from geojax.data.tokenizer_files.content import (
    AddedToken,
    TokenizerContent,
    byte_level,
    shown,
    split,
    tokenizer_json,
)
from geojax.data.tokenizer_files.model_file import file_content, read_model_file
from geojax.data.tokenizer_files.tiktoken_ranks import QWEN_PATTERN
from geojax.errors import UserError
from geojax.json_file import load_json, load_text

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_MODEL_SUFFIXES = (".model", ".tiktoken")

_GPT2_TOKENS = ("<|endoftext|>",)
_ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# Special tokens by class, where no file names them. The key of a folder that names no class is the
# model's type.
_GPT2_CLASSES = {
    **dict.fromkeys(
        ("GPT2Tokenizer", "CodeGenTokenizer", "gpt2", "gpt_neo", "gptj", "codegen"), _GPT2_TOKENS
    ),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "roberta", "bart"), _ROBERTA_TOKENS),
    "opt": ("<s>", "<pad>", "</s>"),
}
_QWEN_CLASSES = {"Qwen2Tokenizer", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
# Their numbers are those of the SentencePiece model; others move them.
_SENTENCEPIECE_CLASSES = {
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "llama",
    "mistral",
}
_SENTENCEPIECE_CLASSES |= {"mixtral", "gemma", "gemma2"}
_WRITTEN_BY_TRANSFORMERS = "a tokenizer.json would do, which save_pretrained of transformers writes"


def read_folder(folder: Path) -> TokenizerContent:
    """Read the tokenizer in a model's folder.

    Its tokens of a document's ends are `bos_token` and `eos_token`; one of them may be None.

    Raises:
        UserError: the folder has no tokenizer or two, or a file is damaged.
    """
    files = _FolderFiles(folder)
    if (path := folder / TOKENIZER).is_file():
        content = _with_added_tokens(path, file_content(path), files)
        return TokenizerContent(content, *files.ends)
    has_bpe = [name for name in (_VOCABULARY, _MERGES) if (folder / name).is_file()]
    models = _models(folder)
    if len(has_bpe) == 1 and not models:
        other = _MERGES if has_bpe == [_VOCABULARY] else _VOCABULARY
        raise UserError(f"{folder}: has {has_bpe[0]}, and no {other}; both would be right")
    found = [*models, *([folder / _VOCABULARY] if len(has_bpe) == 2 else [])]
    if not found:
        raise UserError(
            f"{folder}: holds no tokenizer; a {TOKENIZER}, a {_VOCABULARY} with {_MERGES}, a "
            "tokenizer.model or a file of tiktoken would be right"
        )
    if len(found) > 1:
        raise UserError(
            f"{folder}: holds two tokenizers, {found[0].name} and {found[1].name}; give the path "
            "of one file, or keep one"
        )
    if found[0].name == _VOCABULARY:
        return TokenizerContent(_byte_level_bpe(files), *files.ends)
    files.require_class(_SENTENCEPIECE_CLASSES, found[0])
    read = read_model_file(found[0], file_content(found[0]), files.added_tokens)
    if not any(files.ends):
        return read
    return TokenizerContent(read.json, *files.ends)


def _models(folder: Path) -> list[Path]:
    """Return the files of SentencePiece and tiktoken, of equal ones the first."""
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in _MODEL_SUFFIXES]
    contents: dict[bytes, Path] = {}
    for path in paths:
        if path.is_file():
            contents.setdefault(file_content(path), path)
    return list(contents.values())


class _FolderFiles:
    """The small files beside a tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Read them.

        Raises:
            UserError: one is damaged.
        """
        self.folder = folder
        self.config = _json_if_there(folder / _CONFIG)
        self.special_tokens = {**_json_if_there(folder / _SPECIAL_TOKENS), **self.config}
        self.added_tokens = self._added_tokens()

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The tokens of a document's beginning and end."""
        return self._named("bos_token"), self._named("eos_token")

    @property
    def tokenizer_class(self) -> str | None:
        """Class of transformers, or the model's type; None: no file names either."""
        name = self.config.get("tokenizer_class")
        if not isinstance(name, str):
            name = _json_if_there(self.folder / "config.json").get("model_type")
        return name.removesuffix("Fast") if isinstance(name, str) else None

    def require_class(self, known: Any, path: Path) -> None:
        """Raise a UserError if the folder names a class that reads `path` in another way."""
        name = self.tokenizer_class
        if name is not None and name not in known:
            raise UserError(
                f"{path}: how {shown(name)} reads it is not known; {_WRITTEN_BY_TRANSFORMERS}"
            )

    def named_tokens(self) -> list[AddedToken]:
        """Return the special tokens that the files name by their use."""
        values = [
            value
            for key, value in sorted(self.special_tokens.items())
            if key.endswith("_token") and isinstance(value, str | dict)
        ]
        several = self.special_tokens.get("additional_special_tokens")
        values += several if isinstance(several, list) else []
        return [token for value in values if (token := _token(value)) is not None]

    def _named(self, key: str) -> str | None:
        value = self.special_tokens.get(key)
        if value is None:
            return None
        token = _token(value)
        if token is None:
            raise UserError(
                f"{self.folder}: {key} of {_CONFIG} is {shown(str(value))}; a string, or an object "
                "with the string content, would be right"
            )
        return token.content

    def _added_tokens(self) -> dict[int, AddedToken]:
        """Return the tokens that have a number in the files."""
        tokens: dict[int, AddedToken] = {}
        special = {token.content for token in self.named_tokens()}
        for content, number in _json_if_there(self.folder / _ADDED_TOKENS).items():
            if type(number) is not int or number < 0:
                raise UserError(
                    f"{self.folder / _ADDED_TOKENS}: {shown(content)} has no number; one would be "
                    "right"
                )
            tokens[number] = AddedToken(content, special=content in special)
        decoder = self.config.get("added_tokens_decoder")
        for key, value in decoder.items() if isinstance(decoder, dict) else ():
            token = _token(value)
            if token is None or not (key.isascii() and key.isdigit() and len(key) < 10):
                raise UserError(
                    f"{self.folder / _CONFIG}: {shown(key)} in added_tokens_decoder is no token; "
                    "its number, and an object with the string content, would be right"
                )
            tokens[int(key)] = token
        return tokens


def _json_if_there(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}


def _token(value: Any) -> AddedToken | None:
    """Read a token, which is a string or an object; None: it is neither."""
    if isinstance(value, str):
        return AddedToken(value) if value else None
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    if not value["content"]:
        return None
    flags = {
        name: value[name]
        for name in ("special", "lstrip", "rstrip", "single_word")
        if isinstance(value.get(name), bool)
    }
    return AddedToken(value["content"], **flags)


def _with_added_tokens(path: Path, content: bytes, files: _FolderFiles) -> bytes:
    """Return a `tokenizer.json` that has the tokens of the other files too.

    Raises:
        UserError: a token has another number there, so that the files are not of one tokenizer.
    """
    if not files.added_tokens:
        return content
    parts = load_json(path)
    model, added = parts.get("model"), parts.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        return content  # which the library refuses
    numbers = (
        dict(vocabulary)
        if isinstance(vocabulary, dict)
        else {entry[0]: number for number, entry in enumerate(vocabulary) if entry}
    )
    numbers.update((token["content"], token["id"]) for token in added if isinstance(token, dict))
    token_of = {number: content for content, number in numbers.items()}
    missing = {}
    for number, token in sorted(files.added_tokens.items()):
        known = numbers.get(token.content)
        if known is None and number not in token_of:
            missing[number] = token
        elif known != number:
            here = f"it is {known:,}" if known is not None else f"{shown(token_of[number])} has it"
            raise UserError(
                f"{path}: {shown(token.content)} has the number {number:,} in the files beside it, "
                f"and here {here}; the files of one tokenizer would be right"
            )
    if not missing:
        return content
    for number, token in missing.items():
        added.append({"id": number, **token._asdict()})
        if isinstance(vocabulary, dict):
            vocabulary[token.content] = number
    completed = json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()
    _refuse_renumbered(path, completed, missing)
    return completed


def _refuse_renumbered(path: Path, content: bytes, tokens: Mapping[int, AddedToken]) -> None:
    """Raise a UserError if the library gives other numbers to tokens than their files do."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception:  # the library raises no other type; it is told where all contents are read
        return
    for number, token in tokens.items():
        if backend.token_to_id(token.content) != number:
            raise UserError(
                f"{path}: {shown(token.content)} has the number {number:,} in the files beside it, "
                f"which leaves a gap; {_WRITTEN_BY_TRANSFORMERS}"
            )


def _byte_level_bpe(files: _FolderFiles) -> bytes:
    """Write the `tokenizer.json` of a vocabulary and merges on bytes.

    Raises:
        UserError: the two files are not of such a tokenizer, or of none that is known.
    """
    path = files.folder / _VOCABULARY
    files.require_class(_GPT2_CLASSES.keys() | _QWEN_CLASSES, path)
    vocabulary = load_json(path)
    for text, number in vocabulary.items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path}: {shown(text)} has no number; one would be right")
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if not alphabet <= vocabulary.keys() or any(text.endswith("</w>") for text in vocabulary):
        raise UserError(f"{path}: is no vocabulary of bytes as GPT-2's; {_WRITTEN_BY_TRANSFORMERS}")
    merges = _merges(files.folder / _MERGES, vocabulary)
    added = dict(files.added_tokens)
    named = files.named_tokens()
    named += map(AddedToken, _GPT2_CLASSES.get(files.tokenizer_class or "gpt2", ()))
    for token in named:
        if token.content in vocabulary:
            added.setdefault(vocabulary[token.content], token)
    names = {number: text for text, number in vocabulary.items()}
    if len(names) < len(vocabulary):
        twice = next(text for text, number in vocabulary.items() if names[number] != text)
        raise UserError(
            f"{path}: {shown(twice)} and {shown(names[vocabulary[twice]])} have one number; two "
            "would be right"
        )
    for number, token in added.items():
        if (
            names.get(number, token.content) != token.content
            or vocabulary.get(token.content, number) != number
        ):
            raise UserError(
                f"{path}: {shown(token.content)} has the number {number:,} in the files beside it; "
                "the files of one tokenizer would be right"
            )
    vocabulary.update((token.content, number) for number, token in added.items())
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    prefix = files.config.get("add_prefix_space") is True
    step = byte_level(add_prefix_space=prefix, use_regex=True)
    if files.tokenizer_class in _QWEN_CLASSES:
        step = byte_level(add_prefix_space=prefix, use_regex=False)
        return tokenizer_json(
            model,
            added,
            normalizers=[{"type": "NFC"}],
            pre_tokenizers=[split(QWEN_PATTERN), step],
            decoders=[step],
        )
    return tokenizer_json(model, added, pre_tokenizers=[step], decoders=[step])


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Read the pairs in merges.txt, whose first line may name a version.

    Raises:
        UserError: a line is no pair of tokens of the vocabulary.
    """
    merges = []
    for number, line in enumerate(load_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise UserError(
                f"{path}:{number}: merges no two tokens of {_VOCABULARY} to a third; the files of "
                "one tokenizer would be right"
            )
        merges.append(pair)
    return merges
