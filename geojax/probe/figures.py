"""Figures of a probe as data, which the processes exchange and `--json` writes."""

from typing import Literal

from geojax.accelerators import Precision
from geojax.pipeline.simulation.stage_times import StageTimes
from geojax.settings import Settings
from geojax.topology import SharedCores

Verdict = Literal["ok", "warn", "slow"]
"""Verdict on a measurement: slow is far below the others or the topology; warn means that it works
and a setting limits it."""

Scope = Literal["inside host", "between hosts"]
"""Network of a site."""

CollectiveName = Literal["all-reduce", "reduce-scatter", "all-gather"]


class DeviceFigures(Settings):
    """Figures of one device."""

    site: str
    host: str
    process: int
    """Process that drives the device."""
    device: int
    """JAX's id of the device."""
    kind: str
    """JAX's name of the device's kind."""
    flops_per_second: float
    """Rate of matrix products, in the dtype of the whole check; the median of the rounds."""
    bytes_per_second: float
    """Rate of reading and writing a long vector that is scaled in place; the median of rounds."""
    verdict: Verdict = "ok"

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"device {self.device} (site {self.site}, host {self.host}, process {self.process})"


class CollectiveFigures(Settings):
    """Figures of one collective in one network of one site."""

    site: str
    scope: Scope
    collective: CollectiveName
    devices: int
    """Number of devices in a group."""
    bus_bytes_per_second: dict[int, float]
    """Bus bandwidth as nccl-tests define it, by the bytes of the whole message."""
    verdict: Verdict = "ok"


class NetworkFigures(Settings):
    """Latency of one network of one site."""

    site: str
    scope: Scope
    round_trip_seconds: float
    """Twice the time of a permute from a device to its neighbor."""


class ProbedLink(Settings):
    """Figures of one direction of a link between two sites, measured by one process of each."""

    source: str
    """Site that sends."""
    target: str
    """Site that receives."""
    round_trip_seconds: float
    """Median time of a byte and its answer."""
    bytes_per_second: dict[int, float]
    """Rate of payload that arrived, by the number of TCP streams."""
    packet_share: float
    """Share of payload in a packet; a link's rate is mostly given with headers."""
    verdict: Verdict = "ok"

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"link {self.source} to {self.target}"

    @property
    def best(self) -> float:
        """Bytes per second at the number of streams that carries most."""
        return max(self.bytes_per_second.values())


class HostFigures(Settings):
    """TCP settings of one host of a site."""

    site: str
    host: str
    send_buffer_bytes: int
    """Largest send buffer of a stream (tcp_wmem)."""
    receive_buffer_bytes: int
    """Largest receive buffer of a stream (tcp_rmem)."""
    congestion_control: str
    slow_start_after_idle: bool
    advice: tuple[str, ...] = ()
    """Settings that keep this host from filling its links, and how to change them; a line each."""
    verdict: Verdict = "ok"


class Figures(Settings):
    """All figures of a probe."""

    processes: int
    dtype: Precision
    """Dtype of the matrix products."""
    devices: tuple[DeviceFigures, ...] = ()
    collectives: tuple[CollectiveFigures, ...] = ()
    networks: tuple[NetworkFigures, ...] = ()
    links: tuple[ProbedLink, ...] = ()
    hosts: tuple[HostFigures, ...] = ()
    shared_cores: SharedCores | None = None
    """Times of simulated devices that share cores."""
    stage_times: StageTimes | None = None
    flagged: tuple[str, ...] = ()
    """Findings of what is slow, a sentence each."""
