"""Messages of the rendezvous: one line of JSON each, validated by whoever reads it."""

import base64
import ipaddress
import os
import socket
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import jax
import jaxlib
import pydantic

from geojax.errors import MissingProcessesError, UserError
from geojax.job.exit_messages import NAMED_PROCESSES
from geojax.network_names import SiteName
from geojax.runtime.rendezvous.signatures import derived_key

LONGEST_GREETING = 256
"""Bytes of the longest first line of process 0."""
_SHORT_HELLO = 8192
_LONGEST_ENDPOINT = 1 << 17
"""Letters of the longest endpoint, enough for that of a site of 5,000 processes."""
_UNSIGNED_BYTES = 1 << 26
"""Bytes that all strangers together may make process 0 hold."""
LONGEST_VERDICT = 1 << 26
"""Bytes of the longest line that the others read."""
LONGEST_NOTE = 1 << 24
"""Letters of the longest text of process 0 for all."""
WHO_IS_MISSING = b'"missing?"\n'
"""Question of a process that gives up waiting; the answer is a `Verdict`."""
SAY_SECONDS = 15.0
"""Time after which a process says for whom it waits."""
Waits: TypeAlias = Callable[[Sequence[int]], None]
"""Takes the processes for which this one has waited so long."""
OTHER_KEY = b'"other key"\n'
"""Unsigned answer to a hello with another key, which is a hint for a person and nothing more."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable")
    return text


# Texts are shown to the user: no line breaks, no escape sequences for a terminal.
_Text = Annotated[
    str, pydantic.Field(min_length=1, max_length=255), pydantic.AfterValidator(_printable)
]
_Sentence = Annotated[str, pydantic.Field(max_length=4096), pydantic.AfterValidator(_printable)]
_Gpus = Annotated[str, pydantic.Field(max_length=4096), pydantic.AfterValidator(_printable)]
_Address = Annotated[str, pydantic.AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
_Endpoint = Annotated[
    str, pydantic.Field(max_length=_LONGEST_ENDPOINT), pydantic.AfterValidator(_printable)
]
_Note = Annotated[str, pydantic.Field(max_length=LONGEST_NOTE)]
_Index = Annotated[int, pydantic.Field(ge=0, lt=1 << 20)]


class _Message(pydantic.BaseModel):
    # Unknown keys are ignored: a later geojax may send more.
    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="ignore")

    def line(self) -> bytes:
        """Return the message as it is sent."""
        return self.model_dump_json().encode() + b"\n"


class Greeting(_Message):
    """First line of process 0 on every connection."""

    nonce: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    """Text that makes the signatures of this connection unlike those of all others."""


class Presence(_Message):
    """Facts about one process that every other learns."""

    process: _Index
    host: _Text
    site: SiteName | None = None
    gpus: _Gpus | None = None
    """CUDA_VISIBLE_DEVICES, if set."""
    address: _Address | None = None
    """Address that the host's own name resolves to on it; None if it cannot be resolved."""
    endpoint: _Endpoint | None = None
    """Text by which other runtimes reach this process; their transport reads it."""


class Hello(Presence):
    """Facts that a process tells process 0 about itself."""

    count: Annotated[int, pydantic.Field(ge=1, le=1 << 20)]
    token: _Text
    """Random text that tells a process that connects again from two that claim one index."""
    versions: Annotated[dict[_Text, _Text], pydantic.Field(max_length=8)]
    """Version of each package that compiles the program, by name."""


class Everyone(NamedTuple):
    """Result of a rendezvous."""

    processes: list[Presence]
    """Facts of each process, by its index."""
    key: bytes
    """Key of this start, which the run's key and a nonce make; it signs what they publish later."""
    note: str | None = None
    """Text of process 0 for all, which whoever reads it has to validate."""


class _Columns(_Message):
    """Facts of all processes, a list for each fact: repeated values compress to little."""

    sites: list[SiteName | None]
    hosts: list[_Text]
    gpus: list[_Gpus | None]
    addresses: list[_Address | None]
    endpoints: list[_Endpoint | None]
    nonce: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]


class Verdict(_Message):
    """Line of process 0 that ends the wait of another process."""

    everyone: str | None = None
    """All processes and the nonce of the start's key, compressed; None if the job cannot start."""
    note: _Note | None = None
    """Text of process 0 for all."""
    error: _Sentence | None = None
    """Reason why the job cannot start."""
    missing: list[_Index] | None = None
    """Processes that did not join, if that is the reason."""

    def result(self, own: Hello, key: bytes, timeout_seconds: float) -> Everyone:
        """Return what the verdict, whose signature is the run's `key`'s, says about all processes.

        Raises:
            MissingProcessesError: some process did not join in time.
            UserError: processes do not fit together.
            ValueError: no geojax process has sent this.
        """
        if self.everyone is not None:
            return _unpack(self.everyone, own.count, key)._replace(note=self.note)
        if self.missing is not None:
            if not self.missing or max(self.missing) >= own.count:
                raise ValueError("it names no process of this job")
            error = self.error or missing_sentence(self.missing, own.count, timeout_seconds)
            raise MissingProcessesError(error, self.missing)
        if self.error is not None:
            raise UserError(self.error)
        raise ValueError("it says nothing")


def own_hello(process: int, count: int, site: str | None, endpoint: str | None = None) -> Hello:
    """Return the facts of this process."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = None
    facts = {
        "process": process,
        "count": count,
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "site": site,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "address": address,
        "endpoint": endpoint,
    }
    try:
        return Hello.model_validate(facts)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"process {process}: its {name} cannot be told to the others ({first['msg']}); "
            "one printable line would do"
        ) from None


def longest_hello(connections: int) -> int:
    """Return the bytes of the longest line that process 0 reads; a longer one is a stranger's.

    Args:
        connections: most connections that may be of strangers at a time.
    """
    share = _UNSIGNED_BYTES // connections
    return max(_SHORT_HELLO, min(_SHORT_HELLO + _LONGEST_ENDPOINT, share))


def fresh_for(nonce: str, hello: Hello) -> str:
    """Return what makes the signature of a verdict that of one connection of one process."""
    return f"{nonce} {hello.token}"


def pack(everyone: Sequence[Hello], nonce: str) -> str:
    """Return the facts of all processes as `Verdict.everyone` carries them."""
    columns = _Columns(
        sites=[hello.site for hello in everyone],
        hosts=[hello.host for hello in everyone],
        gpus=[hello.gpus for hello in everyone],
        addresses=[hello.address for hello in everyone],
        endpoints=[hello.endpoint for hello in everyone],
        nonce=nonce,
    )
    return base64.b64encode(zlib.compress(columns.line())).decode()


def _unpack(packed: str, count: int, key: bytes) -> Everyone:
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(base64.b64decode(packed, validate=True), LONGEST_VERDICT)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    columns = _Columns.model_validate_json(text)
    facts: dict[str, Sequence[str | None]] = {
        "site": columns.sites,
        "host": columns.hosts,
        "gpus": columns.gpus,
        "address": columns.addresses,
        "endpoint": columns.endpoints,
    }
    if any(len(column) != count for column in facts.values()):
        raise ValueError("it is of another number of processes")
    processes = [
        Presence.model_validate({"process": process, **dict(zip(facts, row, strict=True))})
        for process, row in enumerate(zip(*facts.values(), strict=True))
    ]
    return Everyone(processes, derived_key(key, columns.nonce))


def missing_sentence(missing: Sequence[int], count: int, timeout_seconds: float) -> str:
    """Return the sentence about processes that did not join."""
    return (
        f"{len(missing)} of {count} processes did not start within {timeout_seconds:g} seconds: "
        f"missing {named(missing)}"
    )


def named(processes: Sequence[int]) -> str:
    """Return a text with the numbers of the first few processes."""
    more = " ..." if len(processes) > NAMED_PROCESSES else ""
    return f"process {', '.join(map(str, processes[:NAMED_PROCESSES]))}{more}"
