"""OpenRAG: teach a retriever what helps a frozen generator, without rebuilding an index (arXiv 2503.08398)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.sparse_spec import is_sparse_encoder
from rag_model.errors import InputError, UsageError
from rag_model.generate.generator import Generator
from rag_model.generate.load import load_generator
from rag_model.needs.reading import PASSAGE as PASSAGE_TOKENS
from rag_model.needs.reading import PROMPT, decoding_bytes, retriever_bytes, weights
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.named import generator_name
from rag_model.retrieve.rerank import PairScorer
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import GENERATOR, PASSAGE, QUESTION
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.bag_memory import BagMemory, propose_bytes
from rag_model.training.data.examples import Example
from rag_model.training.data.judging import Judge, JudgeSettings, Verdict, verdicts
from rag_model.training.data.pools import Pools, check_agreement, pools_of
from rag_model.training.data.teaching import KeptScores
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import Costs, Examples, Job, Objective, Result
from rag_model.training.objectives.openrag.task import Online, OpenRagRecipe, OpenRagTask
from rag_model.training.objectives.sidr.objective import SidrRecipe, sidr_costs, weighing
from rag_model.training.objectives.sidr.pair import SidrPair
from rag_model.training.origins import Named, Origins, pair_of

LOOP = LoopSettings(epochs=10)
"""The rate and the clipping are SiDR's; the number of epochs is this project's."""
_AT_ONCE = 256  # questions
_JUDGED = 8  # pairs that a generator reads together


@dataclass(frozen=True, slots=True)
class OpenRagTraining:
    """Settings of an OpenRAG training."""

    loop: LoopSettings = LOOP
    openrag: OpenRagRecipe = field(default_factory=OpenRagRecipe)
    judge: JudgeSettings = field(default_factory=JudgeSettings)


class OpenRag(Objective[OpenRagTraining]):
    """A SiDR that learns from a generator, which stays as it is."""

    name = "openrag"
    summary = "a SiDR that learns what helps a generator; neither index nor generator changes"
    options = frozenset({"encoder", "generator"})
    settings = OpenRagTraining
    result = Result(
        says="A pair of encoders of weighted terms, tuned to find the passages with which a frozen generator answers "
        "right (OpenRAG, Zhou and Chen 2025). They ask the same index of bags of tokens as before.",
        uses="bookwheel export model:NAME DIR --store STORE, then bookwheel search QUESTION --store STORE --retriever "
        "bag --question-encoder DIR/question",
        role="sentence-similarity",
        parts=frozenset({QUESTION, PASSAGE}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named SiDR, and the generator.

        Raises:
            UsageError: one is not named, or the encoder is no SiDR.
        """
        if named.generator is None:
            raise UsageError(
                "there is no generator to learn from: name one with --generator, a folder, a hub name or model:NAME"
            )
        if named.encoder is None:
            raise UsageError("there is no SiDR to train: make one with `finetune sidr`, and name it with --encoder")
        names = pair_of(store, snapshot, named.encoder).names
        if not is_sparse_encoder(resolve_folder(names[QUESTION])):
            raise UsageError(f"{named.encoder} is no SiDR: make one with `finetune sidr`")
        return Origins({**names, GENERATOR: generator_name(store, named.generator)})

    def prepare(self, job: Job[OpenRagTraining]) -> Examples:
        """Return the training examples with pools, judged by the generator once, and the dev examples as they are.

        Raises:
            InputError: no example has an answer, or no question has both pools.
            RefusedError: score and label of the generator do not go together.
        """
        recipe, train = job.settings.openrag, [one for one in job.examples["train"] if one.answers]
        if not train:
            raise InputError("no training example has an answer: give a file of questions with answers")
        pools = pools_of(_judged(job, train), recipe.pooled)
        if recipe.refuse_disagreement and not job.settings.judge.choices:
            check_agreement(pools)
        return {**job.examples, "train": pools}

    def task(self, job: Job[OpenRagTraining]) -> OpenRagTask:
        """Load the encoders; the index of bags is the snapshot's, or made here."""
        settings, pools = job.settings, job.examples["train"]
        if not isinstance(pools, Pools):
            raise UsageError("the examples of an OpenRAG training have no pools: call `prepare` before")
        pair, generator, every = _pair(job), _generator(job), [*pools, *job.examples["dev"]]
        judge = _judge(job, generator, every)
        scorer = None if settings.judge.choices else _judge(job, generator, every, writes=False)
        memory = BagMemory(job.snapshot, pair.passage.folder, settings.openrag.asked_terms)
        online = Online(memory, judge, settings.judge, scorer)
        return OpenRagTask(pair, pools, job.examples["dev"], settings.openrag, online, job.digests)

    def costs(self, job: Job[OpenRagTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of training, of judging a batch online, and of judging all passages before."""
        recipe, generator, judge = job.settings.openrag, models[GENERATOR], job.settings.judge
        loss = SidrRecipe(batch_size=recipe.batch_size, terms=recipe.terms)
        costs = sidr_costs(job, loss, recipe.answered * recipe.proposed, models)
        tokens = PROMPT + sum(2 for _ in judge.choices) if judge.choices else PROMPT + judge.max_new_tokens
        pair = 2.0 * tokens * generator.operations  # it writes, and scores the gold answer
        proposed = recipe.batch_size * min(recipe.proposed, job.snapshot.n)
        online = proposed * (pair / 2 + PASSAGE_TOKENS * weighing(models[PASSAGE])) if recipe.online else 0.0
        offline = len(job.examples["train"]) * min(recipe.depth, job.snapshot.n) * pair
        held = weights(generator) + decoding_bytes(generator, _JUDGED, judge.max_new_tokens)
        asked = propose_bytes(job.snapshot, resolve_folder(job.origins.names[PASSAGE]))
        if recipe.retriever is not None:
            asked += retriever_bytes(job.snapshot, recipe.retriever)
        stages = {"train": costs.stages["train"] + held + asked, "judge": held + asked + weights(models[QUESTION])}
        look = costs.look + min(recipe.answered or len(job.examples["dev"]), len(job.examples["dev"])) * pair
        return Costs(stages, costs.batches, costs.step + online, look, once=offline)


def _pair(job: Job[OpenRagTraining]) -> SidrPair:
    names = job.origins.names
    return SidrPair.load(resolve_folder(names[QUESTION]), resolve_folder(names[PASSAGE]))


def _generator(job: Job[OpenRagTraining]) -> Generator:
    return load_generator(job.origins.names[GENERATOR], device="cpu" if job.settings.loop.cpu else None)


def _judge(
    job: Job[OpenRagTraining], generator: Generator, examples: Sequence[Example], *, writes: bool = True
) -> PairScorer:
    """Let a generator judge; with a work folder its verdicts are kept, in the blocks in which they were asked."""
    judge = Judge(generator, [one for one in examples if one.answers], job.settings.judge, writes=writes)
    identity = judge.identity(job.digests.get(GENERATOR, ""))
    return KeptScores(judge, identity, job.work, block=_JUDGED) if job.work else judge


def _judged(
    job: Job[OpenRagTraining], train: Sequence[Example]
) -> Iterator[tuple[Example, Sequence[Passage], Sequence[Verdict]]]:
    """Yield each example with its passages and their verdicts."""
    judge = _judge(job, _generator(job), train)
    for example, passages in _found(job, train):
        yield example, passages, _in_blocks(judge, example.question, passages)


def _in_blocks(judge: PairScorer, question: str, passages: Sequence[Passage]) -> list[Verdict]:
    blocks = [passages[first : first + _JUDGED] for first in range(0, len(passages), _JUDGED)]
    return [one for block in blocks for one in verdicts(judge, question, block)]


def _found(job: Job[OpenRagTraining], train: Sequence[Example]) -> Iterator[tuple[Example, Sequence[Passage]]]:
    """Yield each example with what the retriever finds."""
    recipe, pair = job.settings.openrag, _pair(job).eval()
    depth = min(recipe.depth, job.snapshot.n)
    memory = BagMemory(job.snapshot, pair.passage.folder, recipe.asked_terms)
    retriever = None if recipe.retriever is None else open_retriever(job.snapshot, recipe.retriever)
    for first in range(0, len(train), _AT_ONCE):
        some = train[first : first + _AT_ONCE]
        questions = [one.question for one in some]
        if retriever is None:
            found = memory.propose(pair.question.encoder().encode_questions(questions), depth)
        else:
            found = [[hit.passage for hit in hits] for hits in retriever.search(questions, min(depth, retriever.most))]
        for place, (one, passages) in enumerate(zip(some, found, strict=True), start=first):
            job.tell(place, len(train))
            yield one, passages


OPENRAG = OpenRag()
