"""The processor time of `geojax data prepare` beside that of the tokenizer's library alone.

Writes 100 MB of different documents (2 kB in the mean: lines of Python's own library in a drawn
order) as JSON lines and Parquet, and tokenizes them in turn by three sides: `encode_batch` of the
`tokenizers` library on the texts in memory, and the whole command on each of the two files. Prints
a table and writes JSON:

    python benchmarks/data_prepare.py --output benchmarks/results/data_prepare.json
"""

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tokenizers
from worker import processor

from geojax.data.preparation.standard_library import standard_library_documents
from geojax.data.tokenizer import Tokenizer

MEGABYTES = 100
MEAN_BYTES = 2000
VOCABULARY = 32768
ROUNDS = 3
BATCH = 2000

ALONE = f"""
import json, sys, time
import tokenizers
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
backend = tokenizers.Tokenizer.from_file(sys.argv[2])
begin = time.process_time()
for start in range(0, len(texts), {BATCH}):
    backend.encode_batch(texts[start : start + {BATCH}], add_special_tokens=False)
print(time.process_time() - begin)
"""


def main() -> None:
    """Measure all sides in turn."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output", type=Path)
    options.add_argument("--megabytes", type=int, default=MEGABYTES)
    options.add_argument("--workers", type=int, default=None)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="geojax-prepare-") as folder:
        results = measure(Path(folder), arguments.megabytes, arguments.workers)
    print(f"{'side':36} CPU s/MB  of the library")
    for side, seconds in results["cpu_seconds_per_megabyte"].items():
        print(f"{side:36} {seconds:8.3f}  {results['ratios'][side]:.2f}")
    if arguments.output is not None:
        command = f"python benchmarks/data_prepare.py --megabytes {arguments.megabytes}"
        results |= {"command": command}
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def measure(folder: Path, megabytes: int, workers: int | None) -> dict:
    """Write the documents, and measure each side `ROUNDS` times, in turn."""
    texts = list(documents(megabytes * 10**6))
    size = sum(len(text.encode()) for text in texts)
    lines, table = folder / "texts.jsonl", folder / "texts.parquet"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), table, row_group_size=8192)
    library = standard_library_documents(Path(sysconfig.get_path("stdlib")))
    Tokenizer.train(library, vocabulary_size=VOCABULARY).save(folder / "tokenizer.json")
    seconds: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        command = [sys.executable, "-c", ALONE, str(lines), str(folder / "tokenizer.json")]
        alone = float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        seconds.setdefault("encode_batch alone", []).append(alone)
        for name, path in (("JSON lines", lines), ("Parquet", table)):
            output = folder / f"{path.suffix[1:]}-{number}"
            taken = command_seconds(path, folder / "tokenizer.json", output, workers)
            seconds.setdefault(f"geojax data prepare, {name}", []).append(taken)
        print({side: round(times[-1], 1) for side, times in seconds.items()}, flush=True)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    base = medians["encode_batch alone"]
    return {
        "megabytes": size / 1e6,
        "documents": len(texts),
        "mean_bytes": size / len(texts),
        "cpu_seconds": seconds,
        "cpu_seconds_per_megabyte": {side: taken / size * 1e6 for side, taken in medians.items()},
        "ratios": {side: taken / base for side, taken in medians.items()},
        "machine": {"processor": processor(), "python": platform.python_version()},
        "tokenizers": tokenizers.__version__,
        "workers": workers,
        "date": time.strftime("%Y-%m-%d"),
    }


def documents(total: int) -> Iterator[str]:
    """Draw texts of lines of Python's library, until they have so many bytes; none comes twice."""
    draw = random.Random(1)
    library = standard_library_documents(Path(sysconfig.get_path("stdlib")))
    lines = [line for text in library for line in text.splitlines(keepends=True)]
    while total > 0:
        wanted, text = draw.expovariate(1 / MEAN_BYTES), [f"{draw.random()}\n"]
        while wanted > 0:
            text.append(draw.choice(lines))
            wanted -= len(text[-1])
        whole = "".join(text)
        total -= len(whole.encode())
        yield whole


def command_seconds(path: Path, tokenizer: Path, output: Path, workers: int | None) -> float:
    """Return the processor time of the whole command, its imports and workers included."""
    command = [sys.executable, "-m", "geojax", "data", "prepare", str(path)]
    command += ["--tokenizer", str(tokenizer), "--output", str(output)]
    if workers is not None:
        command += ["--workers", str(workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


if __name__ == "__main__":
    main()
