"""The cross-encoder that teaches, with its scores kept in the training's folder."""

from pathlib import Path
from typing import Any

from rag_model.encoders.crossencoder import CrossEncoder
from rag_model.retrieve.rerank import PairScorer
from rag_model.training.data.teaching import KeptScores
from rag_model.training.objectives.objective import Job
from rag_model.training.origins import TEACHER


def teacher_of(job: Job[Any]) -> PairScorer:
    """Load the teacher of a training; if it has a folder, a run that resumes finds the scores there.

    Raises:
        InputError: a file is missing or corrupt, or it is no cross-encoder.
    """
    teacher = CrossEncoder.load(Path(job.origins.names[TEACHER]), device="cpu" if job.settings.loop.cpu else None)
    return KeptScores(teacher, job.digests[TEACHER], job.work, job.tell) if job.work else teacher
