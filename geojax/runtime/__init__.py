"""Process start-up and what watches over a run.

`start` makes this process a part of its job: simulated devices, XLA flags, JAX's distributed
runtime, who runs in which site. `barrier` and `Watchdog` name the process that is missing, `finish`
ends the job together and `abandon` ends it everywhere after an error in one process.
"""

from geojax.runtime.cluster_env import ProcessSettings
from geojax.runtime.compilation_cache import enable_compilation_cache
from geojax.runtime.coordination import (
    MissingProcessesError,
    barrier,
    describe,
    naming_lost_contact,
)
from geojax.runtime.devices import simulate_devices
from geojax.runtime.peer_monitor import abandon
from geojax.runtime.start import finish, start
from geojax.runtime.stop_signals import StopSignals
from geojax.runtime.watchdog import Watchdog, WatchdogSettings
from geojax.runtime.xla_flags import apply_xla_flags, flags_in_force

__all__ = [
    "MissingProcessesError",
    "ProcessSettings",
    "StopSignals",
    "Watchdog",
    "WatchdogSettings",
    "abandon",
    "apply_xla_flags",
    "barrier",
    "describe",
    "enable_compilation_cache",
    "finish",
    "flags_in_force",
    "naming_lost_contact",
    "simulate_devices",
    "start",
]
