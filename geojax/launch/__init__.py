"""Starting the processes of a run, here or over ssh, watching them and leaving none behind.

`supervise` runs `Member`s, each under a guard of its own (`guard.py`), and says which of them
failed first; `local_members` and `Hosts.members` make them.
"""

from geojax.launch.hosts import Hosts
from geojax.launch.output import Output
from geojax.launch.supervisor import Outcome, supervise
from geojax.launch.workers import Member, local_members

__all__ = ["Hosts", "Member", "Outcome", "Output", "local_members", "supervise"]
