"""One file that holds a whole tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from geojax.data.tokenizer_files.content import AddedToken, TokenizerContent
from geojax.data.tokenizer_files.sentencepiece_model import is_model, read_model
from geojax.data.tokenizer_files.tiktoken_ranks import is_ranks, read_ranks
from geojax.errors import UserError

KNOWN_FILES = (
    "a tokenizer.json, which a model on the Hugging Face hub has among its files, of such a "
    "model's folder, of a tiktoken file or of a SentencePiece model"
)
"""Files that can be read, behind "the path of"."""
MOST_BYTES = 1 << 28
"""Most bytes of a tokenizer's file."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def file_content(path: Path) -> bytes:
    """Read a file.

    Raises:
        UserError: it cannot be read, or has more than `MOST_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give the path of {KNOWN_FILES}"
        ) from None
    if len(content) > MOST_BYTES:
        raise UserError(
            f"{path}: has more than {MOST_BYTES:,} bytes, which no tokenizer has; give the path of "
            f"{KNOWN_FILES}"
        )
    if content.startswith(_LFS_POINTER):
        raise UserError(
            f"{path}: is a pointer of Git LFS, not the file; `git lfs pull` fetches the file"
        )
    return content


def read_model_file(
    path: Path, content: bytes, added: Mapping[int, AddedToken] | None = None
) -> TokenizerContent:
    """Read a tokenizer's file of any kind; its first bytes tell the kind.

    Args:
        path: name of the file.
        content: its bytes.
        added: tokens of files beside a SentencePiece model, by number.

    Raises:
        UserError: the kind is not known, or the file is damaged.
    """
    if content.lstrip(b" \t\r\n").startswith(b"{"):
        return TokenizerContent(content)
    if is_ranks(content):
        return read_ranks(path, content)
    if is_model(content):
        return read_model(path, content, added)
    raise UserError(f"{path}: not a tokenizer of a known kind; give the path of {KNOWN_FILES}")
