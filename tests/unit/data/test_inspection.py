"""An inspection of prepared folders names all damage at once, and remembers nothing."""

import json

import numpy as np

from geojax.data.inspection import inspect_folders


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_an_inspection_names_all_that_is_wrong_and_writes_nothing(folder, tmp_path):
    (folder / "train-00000.npy").unlink()
    (folder / "train-00001.npy").write_bytes(b"short")
    flip(folder / "train-00002.npy", 10)
    flip(folder / "train-00003.npy", -2)
    shard = np.load(folder / "train-00004.npy", mmap_mode="r+")
    shard[7] = 65535
    shard.flush()
    before = sorted(folder.iterdir())
    none = tmp_path / "none"
    found = inspect_folders([folder, none, folder], whole=True)
    assert (found.shards, len(found.problems)) == (6, 6)
    expected = {
        "none": "not prepared data (there is no such folder)",
        "train-00000.npy": "is missing although manifest.json lists it",
        "train-00001.npy": "is 5 bytes long where manifest.json says",
        "train-00002.npy": "not a shard of tokens",
        "train-00003.npy": "its tokens are not those that manifest.json was made with",
        "train-00004.npy": "holds token 65,535 at position 7",
    }
    for problem, (name, words) in zip(found.problems, expected.items(), strict=True):
        assert f"{name}: {words}" in problem
        assert "\n" not in problem
    assert len(inspect_folders([folder], whole=False).problems) == 3
    assert sorted(folder.iterdir()) == before


def test_an_inspection_of_whole_folders_finds_no_problem(two_prepared):
    folders = [prepared.folder for prepared in two_prepared]
    for whole in (False, True):
        found = inspect_folders(folders, whole=whole)
        sizes = [path.stat().st_size for folder in folders for path in folder.glob("*.npy")]
        assert found == (len(sizes), sum(sizes), ())


def test_an_inspection_compares_tokenizers_and_the_ends_of_splits(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["beginning"] = manifest["tokenizer"]["end"] = "a"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = inspect_folders([folder], whole=True).problems
    assert "train begins with token" in problem
    (folder / "tokenizer.json").write_text("{}")
    (problem,) = inspect_folders([folder], whole=True).problems
    assert "tokenizer.json" in problem
