"""The relay of a link: a small C program between two TUN devices, compiled on first use."""

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from importlib import resources
from pathlib import Path

from geojax.cache import cache_folder
from geojax.errors import RunError, UserError
from geojax.wan.namespaces import inside
from geojax.wan.settings import WanSettings
from geojax.wan.state import Relay

_FLAGS = ("-O2", "-std=gnu11", "-pthread")

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02

_STOP_SECONDS = 5.0


def compiled() -> Path:
    """Return the relay's executable, compiled with the system's C compiler into the user's cache.

    Raises:
        UserError: there is no C compiler, or it fails.
    """
    source = resources.files("geojax.wan").joinpath("relay.c").read_bytes()
    compiler = shlex.split(os.environ.get("CC", "")) or _compiler_on_path()
    command = [*compiler, *_FLAGS, "-x", "c", "-"]
    key = hashlib.sha256(source + repr(command).encode()).hexdigest()[:16]
    executable = cache_folder() / "wan" / f"relay-{key}"
    if executable.exists():
        return executable
    executable.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=executable.parent) as folder:
        draft = Path(folder) / "relay"
        try:
            done = subprocess.run([*command, "-o", str(draft)], input=source, capture_output=True)
        except OSError as error:
            raise UserError(f"the C compiler {compiler[0]} cannot be run: {error}") from None
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            raise UserError(f"{shlex.join(command)} fails: {words[0] if words else 'no message'}")
        os.replace(draft, executable)
    return executable


def _compiler_on_path() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise UserError(
        "an emulated link needs a C compiler where the kernel lacks netem, for the relay: install "
        "gcc or clang, or set CC"
    )


def open_device(namespace: str, name: str, whole_segments: bool) -> int:
    """Make the TUN device `name` in a namespace; it lives until its descriptor is closed.

    Args:
        namespace: the namespace that gets the device.
        name: name of the device.
        whole_segments: take TCP segments of up to 64 KiB, which a network card would cut.

    Raises:
        UserError: this machine has no TUN devices.
    """
    try:
        with inside(namespace):
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        offloads = _TUN_F_CSUM | (_TUN_F_TSO4 if whole_segments else 0)
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, offloads)
    except OSError as error:
        raise UserError(
            f"/dev/net/tun gives no device ({error.strerror}); a container needs that device, and "
            "the kernel its module tun"
        ) from None
    return descriptor


class RelayStart:
    """A relay process that waits for `begin`, so that every running relay is in a state file."""

    def __init__(
        self, devices: tuple[int, int], settings: WanSettings, cores: tuple[int, int], log: Path
    ):
        """Start the process; it takes over the two devices and writes to `log`.

        Args:
            devices: descriptors of the devices at both ends.
            settings: properties of the link.
            cores: core of the direction from the first device to the second, and of the other.
            log: file for its messages.
        """
        nanoseconds = [settings.delay_seconds * 1e9, settings.jitter_seconds * 1e9]
        numbers = [*nanoseconds, settings.bytes_per_second or 0, settings.queue_limit]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [
                    str(compiled()),
                    *map(str, devices),
                    *map(str, cores),
                    *(str(round(number)) for number in numbers),
                    str(buffer_bytes(settings)),
                    repr(settings.loss),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=devices,
                start_new_session=True,  # Ctrl-C in this terminal is not for it
                cwd="/",
            )
        for descriptor in devices:
            os.close(descriptor)
        number = self._process.pid
        # Late packets would make the link longer, so the relay has priority on its cores, for the
        # few per cent of the time that it needs. A container may not allow it.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(number, os.SCHED_FIFO, os.sched_param(1))
        self.relay = Relay(process_id=number, started=start_time(number), cores=cores)
        self._log = log

    def begin(self) -> None:
        """Let packets through.

        Raises:
            RunError: the relay ended already.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"g")
            self._process.stdin.close()
        except BrokenPipeError:
            words = self._log.read_text().strip() or "no message"
            raise RunError(f"the relay of an emulated link ended at its start: {words}") from None
        # It may outlive this process, so `stop` ends it and not this object, which would complain.
        self._process.returncode = 0


def buffer_bytes(settings: WanSettings) -> int:
    """Return the size of a relay's buffer for one direction: packets that wait or are on the way.

    A packet takes 32 bytes more in the buffer than on a wire, which is much for one of 52 bytes (an
    acknowledgement), so there is room for twice as much.
    """
    on_the_way = settings.bandwidth_delay_product // 2
    return 2 * (on_the_way + settings.queue_limit) + 2**20


def start_time(process: int) -> int:
    """Return when a process started, in clock ticks since the machine did.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return int(_fields(process)[19])


def is_running(relay: Relay) -> bool:
    """Return whether that very process is alive, and not a later one with the same number."""
    try:
        return start_time(relay.process_id) == relay.started and _fields(relay.process_id)[0] != "Z"
    except ProcessLookupError:
        return False


def processor_seconds(relay: Relay) -> float:
    """Return the CPU time in seconds that a relay has taken so far, of both its cores together.

    Raises:
        ProcessLookupError: it has ended.
    """
    user, system = _fields(relay.process_id)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _fields(process: int) -> list[str]:
    """Return the fields of /proc/PROCESS/stat, from the state onwards."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(process) from None


def stop(relay: Relay) -> bool:
    """End that very process if it is alive; return whether it was."""
    if not is_running(relay):
        return False
    os.kill(relay.process_id, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_running(relay):
        if time.monotonic() > deadline:
            os.kill(relay.process_id, signal.SIGKILL)
        time.sleep(0.005)
    with contextlib.suppress(ChildProcessError):  # where this very process started it
        os.waitpid(relay.process_id, 0)
    return True
