"""A preparation that kills itself at some event of its file system, for a test of going on.

    python killed_preparation.py OUTPUT WORKERS EVENT TOKENIZER FILES...

EVENT is the number of the event, from 0 on, at which SIGKILL ends this process; -1: none does. An
event opens, renames or removes a file below OUTPUT. Each is written to OUTPUT/../events.
"""

import os
import signal
import sys
from pathlib import Path

from geojax.data import PrepareSettings, prepare, storage
from geojax.data.preparation import part_tokens, workers

EVENTS = ("open", "os.rename", "os.remove")


def small_sizes() -> None:
    """Have several parts, saved states and shards of little text."""
    workers.PART_BYTES = 20_000
    part_tokens.SAVED_TOKENS = 2_000
    storage.SHARD_TOKENS = 9_000


def kill_at(event_number: int, output: Path) -> None:
    """End this process at an event, and write all of them down."""
    log = (output.parent / "events").open("a")
    seen = -1

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in EVENTS or not str(arguments[0]).startswith(str(output)):
            return
        if event == "open" and not (arguments[1] and set(str(arguments[1])) & set("wa+")):
            return
        seen += 1
        print(event, *arguments[:2], file=log, flush=True)
        if seen == event_number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main() -> None:
    """Prepare the files."""
    output, count, event_number, tokenizer, *files = sys.argv[1:]
    small_sizes()
    kill_at(int(event_number), Path(output))
    source = {"name": "corpus", "files": files, "validation_fraction": 0.1}
    settings = {"output": output, "sources": [source], "workers": count, "tokenizer": tokenizer}
    prepare(PrepareSettings.model_validate(settings))


if __name__ == "__main__":
    main()
