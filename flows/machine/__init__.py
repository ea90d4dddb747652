"""Operate machines.

local: run Prefect, a store and a worker on this machine.
doctor: check this machine, a store, servers and a Flink cluster before a run.
pools, automations: work pools and automations of a Prefect server.
workplace: the temporary store of an index build, and locks of folders.
"""

import beam_jobs  # noqa: F401 - filters the log of Beam, which doctor imports next
