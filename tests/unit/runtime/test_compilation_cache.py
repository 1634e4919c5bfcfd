"""The compilation cache of several processes: all use it or none does."""

import jax
import pytest

from geojax.runtime import agreement, enable_compilation_cache
from geojax.runtime.compilation import programs_digest
from geojax.runtime.key_value_store import publish
from geojax.runtime.xla_flags import recommended_flags

OPTIONS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def options():
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def start(job, tmp_path, monkeypatch):
    """Lets each of three processes enable the cache; gives what it says and if it is used."""
    simulate(job, monkeypatch)

    def start(programs):
        folders = [tmp_path / f"host{process}" / "xla" for process in range(3)]
        for process, folder in enumerate(folders):
            folder.mkdir(parents=True)
            for name in programs[process]:
                (folder / name).touch()
            publish(f"agreement/compilation cache/1/{process}", programs_digest(folder))
        outcomes = []
        for process in job.processes(3):
            jax.config.update("jax_enable_compilation_cache", True)
            agreement._calls.clear()
            said = enable_compilation_cache(folders[process])
            outcomes.append((said, jax.config.jax_enable_compilation_cache))
        return outcomes

    return start


def simulate(job, monkeypatch):
    monkeypatch.setattr(agreement, "barrier", lambda name, timeout_seconds: None)
    monkeypatch.setattr(agreement, "process_index_and_count", lambda: (job.own, job.count))


SHARED = ["jit_train_step-1-cache", "jit_evaluate-2-cache"]


def test_all_use_a_cache_with_the_same_programs(start):
    others = ["jit_train_step-1-atime", "lock"]
    assert start([SHARED, [*SHARED, *others], SHARED[::-1]]) == [(None, True)] * 3
    assert jax.config.jax_compilation_cache_dir is not None


@pytest.mark.parametrize("second", [[], SHARED[:1], [*SHARED, "jit_other-3-cache"]])
def test_none_uses_a_cache_that_only_some_would_hit(start, second):
    """Who misses would wait for the autotuning of who hits."""
    outcomes = start([SHARED, second, SHARED])
    assert [used for _, used in outcomes] == [False] * 3
    for said, _ in outcomes:
        assert "does not hold the same programs for process 1 as for process 0" in said


def test_process_0_alone_reads_what_all_say(job, monkeypatch):
    simulate(job, monkeypatch)
    for process in job.processes(3072):
        publish(f"agreement/answer/1/{process}", "42")
    for _ in job.processes(3072):
        agreement._calls.clear()
        assert agreement.processes_that_differ("answer", "42", 1.0).size == 0
    assert job.store.calls["folder"] == 1
    assert job.store.entries_read == 2 * 3072 - 1


def test_processes_that_compile_share_their_autotuning():
    """It makes all compile the same program; the agreement makes it safe."""
    assert "--xla_gpu_shard_autotuning" not in recommended_flags("gpu")
