"""The cross-encoder that teaches."""

from pathlib import Path
from typing import Any

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.crossencoder import CrossEncoder, by_onnx
from rag_model.encoders.pairs.session import weights_beside
from rag_model.needs.reading import PASSAGE, QUESTION
from rag_model.retrieve.rerank import PairScorer
from rag_model.training.data.pair_scores import WorkerScores
from rag_model.training.data.teaching import KeptScores
from rag_model.training.objectives.objective import Job
from rag_model.training.origins import TEACHER


def teacher_of(job: Job[Any]) -> PairScorer:
    """Load the teacher of a training; a run that resumes finds its scores.

    It scores on the workers of the training, if there are any, and its scores are in the store. Otherwise this process
    scores, and they are in the training's folder; so it is with an ONNX graph whose weights lie in other files, because
    onnxruntime does not follow the links by which a worker has a model's files.

    Raises:
        InputError: a file is missing or corrupt, or it is no cross-encoder.
    """
    folder, identity, cpu = Path(job.origins.names[TEACHER]), job.digests.get(TEACHER, ""), job.settings.loop.cpu
    teacher = CrossEncoder.load(folder, device="cpu" if cpu else None)  # a wrong one is refused before anything is done
    onnx = by_onnx(folder)
    if job.scorer is not None and identity and not (onnx and weights_beside(folder)):
        return WorkerScores(job.store, folder, identity, job.scorer, job.tell, cpu, onnx=onnx)
    return KeptScores(teacher, identity, job.work, job.tell) if job.work else teacher


def teaching(examples: int, passages: int, teacher: Architecture) -> float:
    """Return the floating-point operations of scoring `passages` passages for each of `examples` examples."""
    return examples * passages * (QUESTION + PASSAGE) * teacher.operations
