"""Maintenance of a store.

* `expire`: delete old moves and manifests; `gc`: delete unneeded files; `roots`: needed files
* `retire`: find taken-down pages, delete replaced snapshots; `sweep`: delete while writers run
* `verify`: check the files of a version and the logs of refs; probe a store
"""
