"""The kinds of a tokenizer's files, told apart by content."""

import stat
from pathlib import Path

from geojax.data.tokenizer_files.content import TokenizerContent
from geojax.data.tokenizer_files.huggingface_folder import read_folder
from geojax.data.tokenizer_files.model_file import KNOWN_FILES, file_content, read_model_file
from geojax.errors import UserError


def read_tokenizer(path: Path) -> TokenizerContent:
    """Read a tokenizer's file, or the folder of a model, as a `tokenizer.json`.

    A file that is a `tokenizer.json` stays as it is. Programs in a folder are not run.

    Raises:
        UserError: it cannot be read, or is of no known kind.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give the path of {KNOWN_FILES}"
        ) from None
    if stat.S_ISDIR(mode):
        try:
            return read_folder(path)
        except OSError as error:  # it may not be entered
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); a folder that you may read would do"
            ) from None
    if not stat.S_ISREG(mode):  # a pipe would be waited for, a device never ends
        raise UserError(f"{path}: is no regular file; {KNOWN_FILES} would do")
    return read_model_file(path, file_content(path))
