"""`bookwheel index --plan --index MaxSim`: what token vectors cost, a passage and all of them, before they are paid."""

from flows.command.reply import Reply
from flows.index import Order
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.tokens.cost import cost_of
from rag_model.index.tokens.kind import KIND
from rag_model.needs.machine import CORE, GPU

_ENCODERS = {"MiniLM": 10.6e6, "BERT-base": 85e6}  # weights of the layers: each is used twice a token
_READ = 160  # tokens that an encoder reads of a passage, punctuation and special ones included


def token_prospect(order: Order, n: int, d: int) -> Reply:
    """Plan an index of token vectors over n passages, d components a token; time the codes on this machine.

    Raises:
        UsageError: the codec does not fit `d`.
    """
    plan = KIND.plan(order.recipe, n, d)
    whole, one = KIND.estimate(plan), cost_of(plan)
    encoding = {name: 2 * size * _READ for name, size in _ENCODERS.items()}  # operations a passage
    document = {
        "factory": plan.factory,
        "n": n,
        "d": d,
        "tokens_a_passage": one.tokens,
        "vector_bytes_a_passage": one.vector_bytes,
        "bytes_a_passage": one.code_bytes,
        "coding_seconds_a_passage": round(one.coding_seconds, 6),
        "encoding_seconds_a_passage": {name: round(spent / CORE, 4) for name, spent in encoding.items()},
        "encoding_seconds_a_passage_gpu": {name: round(spent / GPU, 6) for name, spent in encoding.items()},
        "vector_bytes": n * one.vector_bytes,
        "disk_bytes": whole.disk_bytes,
        "work_bytes": whole.work_bytes,
        "stage_bytes": dict(whole.stages),
        "centroids": one.centroids,
    }
    encoded = ", ".join(
        f"{name} {1e3 * spent / CORE:,.0f} ms of a core or {1e3 * spent / GPU:.2f} of a GPU"
        for name, spent in encoding.items()
    )
    hours = {name: n * spent / GPU / 3600 for name, spent in encoding.items()}
    stages = ", ".join(f"{stage} {gigabytes(held)}" for stage, held in whole.stages.items())
    lines = [
        f"index     {plan.factory} over {n:,} passages, {one.tokens} tokens of {d} dimensions each",
        f"a passage {one.vector_bytes:,} bytes of vectors (float16, for builds), {one.code_bytes:,} of codes",
        f"          to encode, about: {encoded}",
        f"          to turn into codes: {1e3 * one.coding_seconds:.2f} ms of a core, measured here just now",
        f"all       {gigabytes(n * one.vector_bytes)} of vectors, {gigabytes(whole.disk_bytes)} of codes, "
        f"{gigabytes(whole.work_bytes)} while they are built",
        f"time      to encode, {' or '.join(f'{name} {spent:,.1f}' for name, spent in hours.items())} hours of a GPU; "
        f"to turn into codes {n * one.coding_seconds / 3600:,.1f} hours of a core",
        f"memory    {stages}; a task each",
    ]
    return Reply(document, "\n".join(lines))
