"""`bookwheel takedown`: remove pages from every snapshot."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from flows.command.reply import Common, Reply, Yes
from flows.parameters import derive_command
from flows.stage import run_flow
from flows.takedown import takedown as takedown_flow
from rag_model.errors import format_count
from rag_model.snapshots.takedown import AffectedSnapshot, choose_wiki, find_affected_snapshots
from rag_model.store.store import Store
from rag_model.store.versions.evaluations import list_evaluations


@derive_command(takedown_flow, excluded=["pages"])
def takedown(
    arguments: dict[str, Any],
    *page: str,
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Remove pages from every snapshot, and keep them out of later builds; a dry run unless --yes.

    A record says who ordered the takedown and why. Snapshots that contain a named page are replaced
    by new ones without it, with new indexes, and the refs move; `gc` deletes the bytes. Evaluations of
    the old snapshots are deleted too. An interrupted run continues when it is run again. A new
    snapshot is signed only if the old one was signed by a key of the trust file, or by your own key
    if there is no trust file. Exits with code 3 if snapshots are left because a running writer
    needs them.

    Args:
        page: Page ids (titles of ready-made passages); without any, continue earlier takedowns.
            Beam's options after `--`.
    """
    pages = tuple(takewhile(lambda word: not word.startswith("--"), page))
    if not yes:
        return _preview_takedown(Store.open(arguments["store"]), pages, arguments["wiki"])
    outcome = run_flow(takedown_flow, **arguments, pages=pages, beam_options=page[len(pages) :])
    lines = [
        f"record    {outcome.record or 'none: all pages were ordered before'}",
        *(f"replaced  {old_id[:12]} by {new_id[:12] or 'nothing'}" for old_id, new_id in outcome.replaced.items()),
        *(f"waiting   {old_id[:12]}: a build or service relies on it; run this again" for old_id in outcome.waiting),
        *(
            f"unsigned  {_shorten_id(version)}: look at it, then sign it with `tag`, if it is yours"
            for version in outcome.unsigned
        ),
        *(f"deleted   evaluation {version[:12]}, whose rows hold passages" for version in outcome.evaluations),
        *(
            ["no snapshot holds such a page: check the ids; later builds leave these pages out"]
            if pages and not outcome.replaced and not outcome.waiting
            else []
        ),
        f"replaced {format_count(len(outcome.replaced), 'snapshot')} and moved refs "
        f"{outcome.moves} times; `gc --grace 0 --yes` deletes the bytes",
    ]
    refusal = (
        f"running builds or services still need {format_count(len(outcome.waiting), 'snapshot')} "
        "with the pages: run the takedown again when they have ended or moved on"
        if outcome.waiting
        else ""
    )
    return Reply({"dry_run": False, **outcome.to_json()}, "\n".join(lines), refusal)


def _shorten_id(name: str) -> str:
    """Return the first 12 digits of an id; return a move of a ref unchanged."""
    return name if "@" in name else name[:12]


def _preview_takedown(store: Store, pages: Sequence[str], wiki: str | None) -> Reply:
    wiki_name = choose_wiki(store, pages, wiki) if pages else ""
    affected_snapshots = find_affected_snapshots(store, wiki_name, pages)
    document: dict[str, Any] = {
        "dry_run": True,
        "wiki": wiki_name,
        "pages": list(pages),
        "snapshots": [
            {
                "snapshot": snapshot.manifest.id,
                "refs": list(snapshot.refs),
                "passages": snapshot.passages,
                "pages": list(snapshot.pages),
            }
            for snapshot in affected_snapshots
        ],
        "evaluations": sorted(
            evaluation.id
            for affected in affected_snapshots
            for evaluation in list_evaluations(store, affected.manifest.id)
        ),
    }
    deletion_lines = [f"evaluation {evaluation_id[:12]}: would be deleted" for evaluation_id in document["evaluations"]]
    return Reply(document, "\n".join([*deletion_lines, *_iter_preview_lines(affected_snapshots, pages)]))


def _iter_preview_lines(affected_snapshots: Sequence[AffectedSnapshot], pages: Sequence[str]) -> Iterator[str]:
    title_by_page = {
        occurrence.page: occurrence.title for affected in affected_snapshots for occurrence in affected.occurrences
    }
    yield from (f"page      {page}: {title}" for page, title in sorted(title_by_page.items()))
    yield from (f"page      {page}: in no snapshot" for page in pages if page not in title_by_page)
    for affected in affected_snapshots:
        refs_text = f", which is {', '.join(affected.refs)}" if affected.refs else ""
        passages_text = f"{affected.passages:,} of {affected.manifest.content.n:,} passages"
        yield f"snapshot  {affected.manifest.id[:12]}{refs_text}: {passages_text}"
    if affected_snapshots or not pages:
        count_text = format_count(len(affected_snapshots), "snapshot")
        yield f"would replace {count_text}; nothing was changed: give --yes to do it"
    else:
        yield "no snapshot holds such a page: check the ids; with --yes later builds leave them out"
