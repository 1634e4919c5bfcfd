import multiprocessing
import sysconfig

import pytest

from geojax.data import Corpus, DataSettings, prepare_standard_library
from geojax.data.preparation import standard_library as module
from geojax.data.preparation.standard_library import open_standard_library
from geojax.errors import UserError


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A library of forty modules, so that the real one is prepared in one test only."""
    library = tmp_path / "library"
    (library / "pydoc_data").mkdir(parents=True)
    (library / "test").mkdir()
    (library / "site-packages").mkdir()
    for number in range(40):
        (library / f"module{number}.py").write_text(f"def function_{number}():\n    pass\n")
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (library / "broken.py").write_bytes(b"name = '\xe9'\n")
    (library / "test" / "test_left_out.py").write_text("left out")
    (library / "site-packages" / "left_out.py").write_text("left out")
    (library / "pydoc_data" / "topics.py").write_text("topics = {'for': 'The for statement'}\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(library))
    return library


def test_documents_are_modules_and_topics(small_library):
    documents = list(module.standard_library_documents(small_library))
    assert len(documents) == 42
    assert documents[-1] == "The for statement"
    assert any("é" in document for document in documents)
    assert not any("left out" in document for document in documents)


def test_it_is_prepared_once_and_kept(small_library, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = prepare_standard_library(vocabulary_size=300)
    assert first.folder.is_relative_to(tmp_path / "cache" / "geojax")
    manifest = first.folder / "manifest.json"
    before = manifest.stat()
    second = prepare_standard_library(vocabulary_size=300)
    assert manifest.stat() == before
    assert second.fingerprint == first.fingerprint
    other = prepare_standard_library(vocabulary_size=310)
    assert other.folder != first.folder
    given = prepare_standard_library(vocabulary_size=300, tokenizer=other.folder / "tokenizer.json")
    assert given.tokenizer.fingerprint == other.tokenizer.fingerprint


def test_a_library_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    with pytest.raises(UserError, match="ships without its library's source"):
        prepare_standard_library(vocabulary_size=300, cache=tmp_path)


def test_a_damaged_cache_says_what_to_remove(small_library, tmp_path):
    folder = prepare_standard_library(vocabulary_size=300, cache=tmp_path).folder
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=f"remove {folder} and it is made anew"):
        prepare_standard_library(vocabulary_size=300, cache=tmp_path)


def _prepare(library, cache, results):
    module.sysconfig.get_path = lambda name: library
    results.put(prepare_standard_library(vocabulary_size=300, cache=cache).fingerprint)


def test_concurrent_first_uses_agree(small_library, tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_prepare, args=(str(small_library), tmp_path / "cache", results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    fingerprints = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(fingerprints) == 1
    assert [path.name[:13] for path in (tmp_path / "cache").iterdir()] == ["python-stdlib"]


@pytest.mark.slow
def test_the_real_library(tmp_path):
    corpus = Corpus.open(DataSettings(cache=tmp_path), open_standard_library)
    prepared = corpus.sources[0].text
    splits = prepared.manifest.splits
    assert splits["train"].tokens > 1_500_000
    assert 0.01 < splits["validation"].tokens / splits["train"].tokens < 0.15
    assert corpus.tokenizer.vocabulary_size == 4096
    stream = prepared.stream("train")
    text = corpus.tokenizer.decode(stream.read(0, len(stream)).tolist())
    assert "def dataclass(" in text
    assert "for_stmt" in text
    assert sysconfig.get_path("stdlib") not in text
