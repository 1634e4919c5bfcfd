"""The format of a file, by its suffix or as given, and the files that patterns name."""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from geojax.data.files.array_records import ArrayRecords
from geojax.data.files.delimited import Delimited
from geojax.data.files.json_lines import JsonLines
from geojax.data.files.opening import is_compressed, suffix_of
from geojax.data.files.records import RecordFile
from geojax.data.files.tables import Arrow, Parquet
from geojax.data.megatron import indexed
from geojax.data.settings import Format
from geojax.errors import UserError
from geojax.json_file import load_json
from geojax.paths import expanded_path

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
_JSON_LINES, _DELIMITED, _ARRAY_RECORDS = JsonLines(), Delimited(), ArrayRecords()
_RECORD_FILES: dict[str, RecordFile] = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": _JSON_LINES,
    ".csv": _DELIMITED,
    ".tsv": _DELIMITED,
    ".parquet": Parquet(),
    ".arrow": Arrow(),
    ".array_record": _ARRAY_RECORDS,
    ".arrayrecord": _ARRAY_RECORDS,
}
_STREAMED = (_JSON_LINES, _DELIMITED)
"""Formats that may be compressed as a whole."""

# Beside the files of a data set; they describe it.
_DESCRIPTIONS = re.compile(
    r"(readme|license|dataset_infos?|dataset_dict|state)(\.(md|txt|json))?", re.IGNORECASE
)
_SPLIT_FILE = re.compile(r"(?P<split>[A-Za-z_]+)-[0-9]{5}-of-[0-9]{5}")


def record_file_of(path: Path, format: Format) -> RecordFile | None:
    """Return the reader of a file of records; None: the file is one text.

    Raises:
        UserError: the suffix tells no format, or the format cannot be compressed.
    """
    if format == "jsonl":
        return _JSON_LINES
    if format == "text":
        return None
    suffix = suffix_of(path)
    found = _RECORD_FILES.get(suffix)
    if found is None and format != "auto":
        return _JSON_LINES
    if found is not None and found not in _STREAMED and is_compressed(path):
        raise UserError(f"{path}: {suffix} files are not compressed as a whole; decompress it")
    if found is None and suffix not in (*_TEXT_SUFFIXES, ""):
        if suffix == ".bin" and path.with_suffix(indexed.SUFFIX).is_file():
            index = path.with_suffix(indexed.SUFFIX).name
            raise UserError(f"{path}: holds tokens; name {index} beside it")
        raise UserError(
            f"{path}: the suffix {suffix} is neither of text ({', '.join(_TEXT_SUFFIXES)}) nor of "
            f"records ({', '.join(_RECORD_FILES)}) nor of Megatron-LM's tokens ({indexed.SUFFIX}); "
            "convert the file, or take it for one document with --format text"
        )
    return found


def holds_tokens(path: Path, format: Format) -> bool:
    """Return whether a file is an index of tokens, beside which they lie."""
    return format == "megatron" or (format == "auto" and suffix_of(path) == indexed.SUFFIX)


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Find the files that `patterns` (files, folders, globs with `**`) name, in order, each once.

    A folder stands for the files below it with a known suffix. Hidden files are left out, and so
    are the descriptions of a data set beside its files of records.

    Raises:
        UserError: a pattern names no file, or a folder with several splits of a data set.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = expanded_path(pattern)
        if path.is_dir():
            files, wanted = _files_below(path), "no file of documents is in this folder"
        elif path.is_file():
            files, wanted = [path], ""
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files = [match for match in matches if match.is_file()]
            wanted = "no such file"
            if "://" in pattern:
                wanted = "is a URL; copy what it names to a disk of this machine"
        if not files:
            raise UserError(f"{pattern}: {wanted}")
        found.update(dict.fromkeys(files))
    return list(found)


def _files_below(folder: Path) -> list[Path]:
    known = (*_TEXT_SUFFIXES, *_RECORD_FILES, indexed.SUFFIX)
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if suffix_of(file) in known
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]
    _require_one_split(folder, files)
    records = [
        file
        for file in files
        if suffix_of(file) in _RECORD_FILES and not _DESCRIPTIONS.fullmatch(file.name)
    ]
    return [file for file in files if not (records and _DESCRIPTIONS.fullmatch(file.name))]


def _require_one_split(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder that holds several splits of one data set, some of which are no training."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():  # as `DatasetDict.save_to_disk` writes it
        splits = load_json(saved).get("splits")
        if isinstance(splits, list) and splits:
            names = " and ".join(f"'{str(split)[:40]}'" for split in splits[:6])
            raise UserError(f"{folder}: holds the splits {names}; name the folder of one of them")
    found = {
        match["split"]
        for file in files
        if suffix_of(file) in (".parquet", ".arrow", ".jsonl")
        and (match := _SPLIT_FILE.match(file.name))
    }
    if len(found) > 1:
        names = " and ".join(f"'{split}'" for split in sorted(found))
        raise UserError(
            f"{folder}: holds the splits {names}; name the files of one, as "
            f"'{folder}/**/{'train' if 'train' in found else min(found)}-*'"
        )
