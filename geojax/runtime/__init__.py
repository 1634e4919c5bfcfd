"""Process start-up, barriers, and detection of processes that died or hang.

`start` makes this process a part of its job: simulated devices, XLA flags, JAX's distributed
runtime, the site of each process. `barrier` and `Watchdog` name the process that is missing,
`finish` ends the job together, and `abort_job` ends it everywhere after an error in one process.
"""

from geojax.errors import MissingProcessesError
from geojax.job.cluster_env import ProcessSettings
from geojax.job.exit_messages import describe
from geojax.runtime.barrier import barrier
from geojax.runtime.compilation import enable_compilation_cache
from geojax.runtime.devices import simulate_devices
from geojax.runtime.liveness.lost_contact import translate_collective_errors
from geojax.runtime.liveness.peer_monitor import abort_job
from geojax.runtime.liveness.watchdog import Watchdog, WatchdogSettings
from geojax.runtime.profile_signal import ProfileSignal
from geojax.runtime.start import finish, start
from geojax.runtime.stop_signals import StopSignals
from geojax.runtime.xla_flags import apply_xla_flags, flags_in_force

__all__ = [
    "MissingProcessesError",
    "ProcessSettings",
    "ProfileSignal",
    "StopSignals",
    "Watchdog",
    "WatchdogSettings",
    "abort_job",
    "apply_xla_flags",
    "barrier",
    "describe",
    "enable_compilation_cache",
    "finish",
    "flags_in_force",
    "simulate_devices",
    "start",
    "translate_collective_errors",
]
