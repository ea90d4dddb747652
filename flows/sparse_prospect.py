"""`bookwheel index --plan --index Impact`: what weighted terms cost, a passage and all, before they are paid."""

from flows.command.reply import Reply
from flows.index import Order
from rag_model.index.postings.impact import KIND, ROW_BYTES, TERMS, passage_bytes
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import CORE, GPU

_LAYERS, _HIDDEN = 85e6, 768  # weights of BERT-base's layers, and its width: SPLADE's models are of this size
_READ = 160  # tokens that an encoder reads of a passage, special ones included


def sparse_prospect(order: Order, n: int, d: int) -> Reply:
    """Plan an index of weighted terms over n passages, of a vocabulary of d terms."""
    plan = KIND.plan(order.recipe, n, d)
    whole, one = KIND.estimate(plan), passage_bytes(plan)
    spent = 2 * _READ * (_LAYERS + _HIDDEN * (_HIDDEN + d))  # operations a passage: the layers, and logits of all terms
    document = {
        "factory": plan.factory,
        "n": n,
        "vocabulary": d,
        "terms_a_passage": TERMS,
        "row_bytes_a_passage": ROW_BYTES,
        "bytes_a_passage": one,
        "encoding_seconds_a_passage": {"BERT-base": round(spent / CORE, 4)},
        "encoding_seconds_a_passage_gpu": {"BERT-base": round(spent / GPU, 6)},
        "row_bytes": n * ROW_BYTES,
        "disk_bytes": whole.disk_bytes,
        "work_bytes": whole.work_bytes,
        "stage_bytes": dict(whole.stages),
    }
    stages = ", ".join(f"{stage} {gigabytes(held)}" for stage, held in whole.stages.items())
    lines = [
        f"index     {plan.factory} over {n:,} passages, about {TERMS} of {d:,} terms each",
        f"a passage {ROW_BYTES:,} bytes of terms and weights (for builds), {one:,} of postings",
        f"          to encode, about: BERT-base {1e3 * spent / CORE:,.0f} ms of a core or {1e3 * spent / GPU:.2f} of a "
        "GPU",
        f"all       {gigabytes(n * ROW_BYTES)} of terms, {gigabytes(whole.disk_bytes)} of postings, "
        f"{gigabytes(whole.work_bytes)} while they are built",
        f"time      to encode, BERT-base {n * spent / GPU / 3600:,.1f} hours of a GPU",
        f"memory    {stages}; a task each",
    ]
    return Reply(document, "\n".join(lines))
