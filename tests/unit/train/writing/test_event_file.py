"""TensorBoard's event files, read as it reads them."""

import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from geojax.train.writing.event_file import event_file, scalars_record


def events_in(content):
    while content:
        length = content[:8]
        (size,) = struct.unpack("<Q", length)
        event, content = content[12 : 12 + size], content[16 + size :]
        assert masked_crc32c(length) == masked_crc32c(struct.pack("<Q", len(event)))
        yield Event.FromString(event)


def test_a_resumed_log_hides_the_points_that_come_again(tmp_path):
    file = event_file(tmp_path, purged_from=4)
    file.append(scalars_record(4, {"loss": 2.5, "link/west/wait_seconds": 0.5}))
    version, start, points = events_in(file.path.read_bytes())
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (4, SessionLog.START)
    assert points.step == 4
    values = {each.tag: each.simple_value for each in points.summary.value}
    assert values == {"loss": 2.5, "link/west/wait_seconds": 0.5}
    assert file.path.name.startswith("events.out.tfevents.")
