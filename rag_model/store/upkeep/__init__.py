"""Maintenance of a store.

* `expire`: delete old moves and manifests; `gc`: delete unneeded files; `roots`: find needed files,
  and delete others while writers run
* `retire`: find taken-down pages, delete replaced snapshots
* `verify`: check the files of a version and the logs of refs; probe a store
"""
