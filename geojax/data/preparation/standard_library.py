"""The corpus that needs no download: the standard library of the Python that runs.

Its documents are the library's modules (source with docstrings) and the topics of the language
reference that `help()` shows. Tests, tables of data and generated files are left out. It is
prepared on first use and kept in the user's cache folder.
"""

import ast
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from geojax.cache import cache_folder
from geojax.data.files.text import split_text
from geojax.data.preparation.atomic_folder import atomic_folder, is_taken
from geojax.data.preparation.file_tokens import Assigned, append_tokens, is_held_out, tokenized
from geojax.data.preparation.preparation import write_prepared
from geojax.data.progress import work_progress
from geojax.data.settings import DataSettings
from geojax.data.storage import TRAIN, VALIDATION, VERSION, Prepared
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

HOLD_OUT = 0.05
"""Share of the documents that are the validation set."""

_LEFT_OUT_FOLDERS = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
        "encodings",  # tables of characters
        "pydoc_data",  # read as documentation instead
    }
)
_LEFT_OUT_FILES = ("_sysconfigdata*.py", "entities.py", "*_pb2.py")


def open_standard_library(settings: DataSettings, progress: bool = False) -> Prepared:
    """Prepare the corpus with the vocabulary of a run's settings, unless it is prepared."""
    return prepare_standard_library(
        vocabulary_size=settings.vocab_size,
        tokenizer=settings.tokenizer,
        cache=settings.cache,
        progress=progress,
    )


def prepare_standard_library(
    *,
    vocabulary_size: int,
    tokenizer: Path | None = None,
    cache: Path | None = None,
    progress: bool = False,
) -> Prepared:
    """Return the standard library as a prepared folder, which is made unless it is in the cache.

    `cache` is the folder that keeps it, by default `geojax` in the user's cache folder
    (`$XDG_CACHE_HOME`, else `~/.cache`). Several processes may call this at once: one prepares, the
    others wait for it. A given tokenizer (a file or a model's folder) is used in place of one
    that is trained on the corpus.

    Raises:
        UserError: this Python ships without the library's source, or the cache cannot be written.
    """
    given = Tokenizer.load(tokenizer) if tokenizer else None
    vocabulary = f"tokenizer-{given.fingerprint[:12]}" if given else f"vocabulary-{vocabulary_size}"
    name = f"python-stdlib-{platform.python_version()}-{vocabulary}-v{VERSION}"
    folder = (cache or cache_folder()) / name
    if not is_taken(folder):
        with atomic_folder(folder, wait=True) as partial:
            if partial is not None:
                _prepare(partial, given, vocabulary_size, progress=progress)
    try:
        return Prepared(folder)
    except UserError as error:
        raise UserError(f"{error}; remove {folder} and it is made anew") from None


def standard_library_documents(library: Path) -> Iterator[str]:
    """Yield the texts of the modules below the folder `library`, then of the documentation."""
    for path in sorted(library.rglob("*.py")):
        folders = path.relative_to(library).parts[:-1]
        if _LEFT_OUT_FOLDERS.intersection(folders) or any(map(path.match, _LEFT_OUT_FILES)):
            continue
        try:
            with tokenize.open(path) as file:
                yield file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a broken link, or a file that is meant to be no valid Python
    yield from _topics(library / "pydoc_data" / "topics.py")


def _topics(path: Path) -> Iterator[str]:
    """Return the texts in pydoc's table of topics: `topics = {'name': 'text', ...}`."""
    if not path.is_file():
        return
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Dict):
            yield from ast.literal_eval(value).values()


def _prepare(
    folder: Path, given: Tokenizer | None, vocabulary_size: int, *, progress: bool
) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    texts = [text for text in standard_library_documents(library) if text.strip()]
    if not texts:
        raise UserError(
            f"{library}: this Python ships without its library's source; give prepared data"
        )
    held_out = [is_held_out(text.encode(), HOLD_OUT) for text in texts]
    with work_progress(enabled=progress) as bar:
        bar.begin("training the tokenizer of python-stdlib")

        def documents() -> Iterator[Assigned]:
            for text, is_validation in zip(texts, held_out, strict=True):
                for piece in split_text(text):
                    yield Assigned(VALIDATION if is_validation else TRAIN, piece)
                advance(len(text))

        training = (
            text for text, is_validation in zip(texts, held_out, strict=True) if not is_validation
        )
        tokenizer = given or Tokenizer.train(training, vocabulary_size=vocabulary_size)
        advance = bar.begin("preparing python-stdlib", sum(map(len, texts)))
        write_prepared(
            folder,
            lambda appends: append_tokens(tokenized(documents(), tokenizer), appends),
            tokenizer,
        )
