"""What a probe has measured, as data: what the processes tell each other and `--json` writes."""

from typing import Literal

from geojax.accelerators import Precision
from geojax.pipeline.simulation.stage_times import StageTimes
from geojax.settings import Settings

Verdict = Literal["ok", "look", "slow"]
"""slow: far from the others, or from what the topology promises. look: it works, and a setting
keeps it from more."""

Scope = Literal["inside host", "between hosts"]
"""Which network of a site."""

CollectiveName = Literal["all-reduce", "reduce-scatter", "all-gather"]


class DeviceFigures(Settings):
    """One device."""

    site: str
    host: str
    process: int
    """The process that drives it."""
    device: int
    """Its JAX id."""
    kind: str
    """How JAX names it."""
    flops_per_second: float
    """Of matrix products, in the dtype of the whole check; the median of the rounds."""
    bytes_per_second: float
    """Read and written, of a long vector that is scaled in place; the median of the rounds."""
    verdict: Verdict = "ok"

    @property
    def name(self) -> str:
        """For a message."""
        return f"device {self.device} (site {self.site}, host {self.host}, process {self.process})"


class CollectiveFigures(Settings):
    """One collective in one network of one site."""

    site: str
    scope: Scope
    collective: CollectiveName
    devices: int
    """Of a group."""
    bus_bytes_per_second: dict[int, float]
    """By the bytes of the whole message, bus bandwidth as nccl-tests define it."""
    verdict: Verdict = "ok"


class NetworkFigures(Settings):
    """How long a small message takes in one network of one site."""

    site: str
    scope: Scope
    round_trip_seconds: float
    """Twice a permute's time from a device to its neighbour."""


class LinkFigures(Settings):
    """One direction of the link between two sites, between one process of each."""

    source: str
    """The site that sends."""
    target: str
    """The site that receives."""
    round_trip_seconds: float
    """The median of a byte and its answer."""
    bytes_per_second: dict[int, float]
    """By the number of TCP streams, payload that arrived."""
    packet_share: float
    """What of a packet is payload: a link's rate is mostly given with headers."""
    verdict: Verdict = "ok"

    @property
    def name(self) -> str:
        """For a message."""
        return f"link {self.source} to {self.target}"

    @property
    def best(self) -> float:
        """Bytes per second with the number of streams that carries most."""
        return max(self.bytes_per_second.values())


class HostFigures(Settings):
    """What Linux allows the TCP streams of one host of a site."""

    site: str
    host: str
    send_buffer_bytes: int
    """The most that the kernel grows a stream's buffer to (tcp_wmem)."""
    receive_buffer_bytes: int
    """The same for receiving (tcp_rmem)."""
    congestion_control: str
    slow_start_after_idle: bool
    advice: tuple[str, ...] = ()
    """What keeps this host from filling its links, and what to change; a line each."""
    verdict: Verdict = "ok"


class Figures(Settings):
    """All that a probe found."""

    processes: int
    dtype: Precision
    """Of the matrix products."""
    devices: tuple[DeviceFigures, ...] = ()
    collectives: tuple[CollectiveFigures, ...] = ()
    networks: tuple[NetworkFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    hosts: tuple[HostFigures, ...] = ()
    stage_times: StageTimes | None = None
    flagged: tuple[str, ...] = ()
    """What is slow, a sentence each."""
