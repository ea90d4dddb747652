"""The training loop, which does not depend on the objective.

* `task`: the protocol of tasks that the loop trains
* `loop`: the loop and its optimizer
* `loop_settings`: settings of the loop and the learning rate schedule
* `checkpoint`: checkpoints and the folder of a training
* `journal`: the log of steps and evaluations, `metrics.jsonl` and TensorBoard
"""
