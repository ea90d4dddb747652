"""What a training of several stages says of itself: which stage, how much is scored, how many evaluations are left."""

from flows.watch import TrainingWatch


class Said:
    """Keeps the sentences and the progress."""

    def __init__(self) -> None:
        self.sentences, self.progress = list[str](), list[tuple[int, int]]()

    def __call__(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_a_stage_is_named_and_its_evaluations_are_counted_by_its_own_settings() -> None:
    said = Said()
    watch = TrainingWatch(said, dev=7, every=500)
    watch("stage lm", 0, 0, {"evaluate_every": 2})
    watch("evaluate", 0, 4, {})
    watch("dev", 0, 4, {"nll": 1.0})
    assert said.sentences[:2] == ["stage lm begins", "evaluates the initial weights on 7 dev examples …"]
    assert "; 2 more" in said.sentences[2], "of 4 steps, each 2"


def test_scoring_is_told_once_and_its_progress_is_shown() -> None:
    said = Said()
    watch = TrainingWatch(said, dev=7, every=2)
    for done in (1, 2, 3):
        watch("score", done, 3, {})
    assert said.sentences == ["a generator scores the passages of the examples, in 3 blocks …"]
    assert said.progress == [(1, 3), (2, 3), (3, 3)]
