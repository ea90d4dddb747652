"""The progress messages of a training: its stages, scoring, evaluations and rebuilds."""

from flows.finetune import TrainingWatch
from rag_model.training.moving_index import MovingSettings


class OutputRecorder:
    """Record the messages and the progress."""

    def __init__(self) -> None:
        self.sentences, self.progress = list[str](), list[tuple[int, int]]()

    def __call__(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_stage_is_named_and_its_evaluations_are_counted() -> None:
    recorder = OutputRecorder()
    watch = TrainingWatch(recorder, n_dev=7, evaluate_every=500)
    watch("stage lm", 0, 0, {"evaluate_every": 2})
    watch("evaluate", 0, 4, {})
    watch("dev", 0, 4, {"nll": 1.0})
    assert recorder.sentences[:2] == ["stage lm begins", "evaluates the initial weights on 7 dev examples …"]
    assert "; 2 more" in recorder.sentences[2], "one evaluation after every second of 4 steps"


def test_scoring_is_reported_once_with_progress() -> None:
    recorder = OutputRecorder()
    watch = TrainingWatch(recorder, n_dev=7, evaluate_every=2)
    for done in (1, 2, 3):
        watch("score", done, 3, {})
    assert recorder.sentences == ["a generator scores the passages of the examples, in 3 blocks …"]
    assert recorder.progress == [(1, 3), (2, 3), (3, 3)]


def test_rebuilds_are_reported_when_they_start_and_when_searched() -> None:
    recorder = OutputRecorder()
    watch = TrainingWatch(recorder, n_dev=7, evaluate_every=500, moving=MovingSettings(every=2))
    for step, age in ((1, 0), (2, 1), (3, 0), (4, 1)):
        watch("move", step, 4, {})
        watch("train", step, 4, {"loss": 1.0, "snapshot_age": age, "rebuild_seconds": 180.0})
    assert recorder.sentences == [
        "rebuilds the index with the encoders of step 2, and waits for it …",
        "searches the index of step 2 now; its rebuild took 3 min",
    ]
    assert recorder.progress == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_training_that_ends_before_its_rebuild_is_reported() -> None:
    recorder = OutputRecorder()
    watch = TrainingWatch(recorder, n_dev=7, evaluate_every=500, moving=MovingSettings(every=2, mode="asynchronous"))
    for step in (1, 2, 3):
        watch("move", step, 3, {})
        watch("train", step, 3, {"snapshot_age": step - 1, "rebuild_seconds": 0.0})
    watch("evaluate", 3, 3, {})
    watch("dev", 3, 3, {"nll": 1.0})
    assert recorder.sentences[0] == "rebuilds the index with the encoders of step 2 …"
    assert recorder.sentences[-1] == "searched the first index at every step, because no rebuild finished in time"
