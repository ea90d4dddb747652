"""Versions in the store, and their names.

* `manifest`, `model_manifest`, `evaluation_manifest`: the JSON records; `checks`: their validation
* `catalog`: the manifests of one kind; `refs`: names of versions; `moves`: tag, roll back, untag
* `snapshot`: open a snapshot for reading; `mapped`: memory-mapped passages
* `models`, `evaluations`: store, find and export them; `trainings`: unfinished trainings
* `takedowns`: pages that no snapshot may contain; `signatures`: who published a version
"""
