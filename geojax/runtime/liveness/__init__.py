"""Detection of processes that died, hang or fall behind: heartbeats and what reads them.

`heartbeat` keeps one entry per process in the key-value store, and `health` a report of process 0
on all of them. `peer_monitor` ends this process when another one failed or went silent, `watchdog`
when a step takes far too long, and `lost_contact` explains a broken collective.
"""
