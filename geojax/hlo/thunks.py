"""The order in which XLA's runtime for GPUs launches a program, and on which streams.

With the compiler option `xla_dump_to`, XLA writes two files about each program. The thunk sequence
lists what the runtime launches, the body of a loop indented below the loop; the metadata name the
HLO instruction of each thunk:

    003: kAsyncStart   [...] stream=communication_stream[0], async_id=3
        002: kReduceScatter [...]
    004: kCustomKernel [...] gemm_fusion_dot_187
    006: kAsyncStart   [...] stream=communication_stream[1], async_id=6
        005: kAllReduce [...]
    007: kAsyncDone    [...] async_id=3

The operations of one stream run one after the other. Two collectives are in flight together if one
starts before the other is done and they are on different streams: here 003 and 006. Collectives
that start in a loop are in flight beside those that started before the loop.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from geojax.hlo.module import HloParseError

_THUNK = re.compile(r"^(?P<indent> *)(?P<number>\d+): k(?P<kind>\w+)(?P<rest>.*)$")
_LABEL = re.compile(r"^(?P<indent> *)\w+:$")
_STREAM = re.compile(r"stream=communication_stream\[(?P<stream>\d+)\]")
_ASYNC_ID = re.compile(r"\basync_id=(\d+)")
_NAMED = re.compile(r'profile_annotation: "(?P<name>[^"]*)"\s+thunk_id: (?P<number>\d+)')
_COLLECTIVE = re.compile(r"(All(Gather|Reduce|ToAll)|ReduceScatter|RaggedAllToAll|Collective\w+)$")


@dataclass
class Launch:
    """A collective as the runtime launches it."""

    instruction: str
    """The HLO instruction; of an asynchronous one its start."""
    stream: str | None
    """Number of the communication stream; None: the compute waits for the collective."""
    together: set[str] = field(default_factory=set)
    """Instructions of the collectives that are in flight with it on other streams."""


def read_launches(folder: Path) -> tuple[Launch, ...]:
    """Read the collectives of the one program whose dump lies in `folder`, in their order.

    Raises:
        HloParseError: the folder holds no dump of one program for GPUs, or one of an unknown form.
    """
    sequences = sorted(folder.glob("*.thunk_sequence.txt"))
    metadata = sorted(folder.glob("*.thunk_metadata.txt"))
    if len(sequences) != 1 or len(metadata) != 1:
        raise HloParseError(
            f"thunks: the dump holds {len(sequences)} thunk sequences; compile one program for GPUs"
        )
    return parse_launches(sequences[0].read_text(), metadata[0].read_text())


def parse_launches(sequence: str, metadata: str) -> tuple[Launch, ...]:
    """Read the collectives of a thunk sequence and its metadata, in the order of their launches.

    Raises:
        HloParseError: the text names no thunk that the metadata know.
    """
    names = {found["number"]: found["name"] for found in _NAMED.finditer(metadata)}
    launches: list[Launch] = []
    # By the indentation of the list in which they start: the launches in flight, by async_id.
    in_flight: dict[int, dict[str, Launch]] = {}
    start = None  # the start that the line before was, with its indentation
    for line in sequence.splitlines():
        found = _THUNK.match(line) or _LABEL.match(line)
        if found is None:
            continue
        indent, kind = len(found["indent"]), found.groupdict().get("kind") or ""
        for deeper in [level for level in in_flight if level > indent]:
            del in_flight[deeper]
        if _COLLECTIVE.match(kind):
            if start is None:
                launches.append(Launch(_name(names, found["number"]), None))
            else:
                launches.append(_launched(names, *start, in_flight))
        start = (found, indent) if kind == "AsyncStart" else None
        if kind == "AsyncDone":
            key = _ASYNC_ID.search(line)
            in_flight.get(indent, {}).pop(key[1] if key else "", None)
    return tuple(launches)


def _launched(
    names: dict[str, str],
    start: re.Match[str],
    indent: int,
    in_flight: dict[int, dict[str, Launch]],
) -> Launch:
    """Add the launch of an asynchronous collective to those in flight, and return it."""
    stream, key = _STREAM.search(start["rest"]), _ASYNC_ID.search(start["rest"])
    if stream is None or key is None:
        raise HloParseError(f"thunks: a start without stream or async_id: {start[0].strip()}")
    launch = Launch(_name(names, start["number"]), stream["stream"])
    for other in (each for level in in_flight.values() for each in level.values()):
        if other.stream != launch.stream:
            other.together.add(launch.instruction)
            launch.together.add(other.instruction)
    in_flight.setdefault(indent, {})[key[1]] = launch
    return launch


def _name(names: dict[str, str], number: str) -> str:
    if number.lstrip("0") not in names:
        raise HloParseError(f"thunks: the metadata do not name thunk {number}")
    return names[number.lstrip("0")]
