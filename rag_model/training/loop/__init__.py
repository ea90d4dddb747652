"""The training loop, which does not depend on the objective.

* `task`: the protocol of tasks that the loop trains
* `loop`: the loop, the optimizer, and forward passes in parts that fit into memory
* `loop_settings`: settings of the loop and the learning rate schedule
* `checkpoint`: checkpoints and the folder of a training, with its log, `metrics.jsonl`
"""
