"""The parts of a build that do not depend on where it runs.

* `recipe`, `encoding`, `planning`: the settings of a build, and its plan.
* `parent`, `reused_training`, `parent_index`, `existing`: results of earlier snapshots that are
  reused.
* `stage_results`, `content`, `imported`: results of the stages, and the snapshot made from them.
* `measure`: tuned search parameters, and metrics.
* `publish`, `takedown`: publish snapshots with their report, remove pages.
"""
