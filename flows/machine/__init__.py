"""Operating this machine: local processes, clusters, pools, automations, `doctor`."""
