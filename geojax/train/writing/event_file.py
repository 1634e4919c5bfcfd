"""TensorBoard's event files, record by record.

tensorboardX has a writer with a thread of its own, which a full disk ends with a traceback, and
whose queue then holds up training for ever.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from geojax.train.writing.appended_file import AppendedFile

_VERSION = "brain.Event:2"


def event_file(folder: Path, purged_from: int | None) -> AppendedFile:
    """Return a new event file in `folder`; `purged_from` hides older points from that step on."""
    now = time.time()
    head = _record(Event(wall_time=now, file_version=_VERSION))
    if purged_from is not None:
        start = SessionLog(status=SessionLog.START)
        head += _record(Event(wall_time=now, step=purged_from, session_log=start))
    name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
    return AppendedFile(folder / name, head)


def scalars_record(step: int, values: Mapping[str, float]) -> bytes:
    """Return the record of numbers of a step, by name."""
    points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _record(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))


def _record(event: Event) -> bytes:
    """Frame an event as a TFRecord: its length and itself, each with a checksum."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    parts = (length, _checksum(length), content, _checksum(content))
    return b"".join(parts)


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
