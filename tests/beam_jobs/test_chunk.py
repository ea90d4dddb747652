"""The estimated time of the chunk job, which decides where it runs, and the template job before it."""

from pathlib import Path

from beam_jobs.chunk import ChunkTask, _seconds, collect_templates, load_table, plan_template_tasks
from beam_jobs.launch import Launch
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Part, Siteinfo, Slice
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

MEGABYTE = Slice("dump.xml.bz2", 0, 1 << 20, "bz2", 1, 9)
SITE = Siteinfo("enwiki", "en", "")


def seconds(size: int = 0) -> float:
    """Of a megabyte, cut by a chunker whose encoder has `size` bytes."""
    files = (("encoder", (("model.safetensors", BlobRef("sha256:" + "0" * 64, size)),)),) if size else ()
    return _seconds(ChunkTask(Part("part-00000", "wiki", 1, 9, (MEGABYTE,)), SITE, ChunkRecipe(), setting_files=files))


def test_a_chunker_with_a_model_takes_as_long_as_encoding_its_passages() -> None:
    assert 0.5 < seconds() < 2
    assert seconds(700_000) < 2, "a tokenizer"
    assert 20 < seconds(90_000_000) < 80, "MiniLM: 3,400 passages"


def test_the_templates_of_a_dump_are_read_once(tmp_path: Path) -> None:
    pages = "".join(
        f"<page><title>{title}</title><ns>{key}</ns><id>{i}</id><revision><id>1</id><text>{text}</text></revision></page>"
        for i, (title, key, text) in enumerate([("A", 0, "A {{b|c}}."), ("Template:B", 10, "b: {{{1}}}")], 1)
    )
    names = '<namespaces><namespace key="10">Template</namespace></namespaces>'
    store, folder = Store.open(str(tmp_path / "store"), create=True), tmp_path / "work"
    folder.mkdir()
    tables = []
    for name, xml in (("with", pages), ("without", pages.replace("<ns>10</ns>", "<ns>4</ns>"))):
        dump = tmp_path / f"{name}.xml"
        dump.write_text(f'<mediawiki xml:lang="en"><siteinfo>{names}</siteinfo>{xml}</mediawiki>', encoding="utf-8")
        plan, launch = plan_dump(str(dump), workdir=folder, stage=str), Launch.new(store.url, [])
        tables.append(collect_templates(store, plan, launch))
        tasks = plan_template_tasks(plan)
        assert len(tasks) == (name == "with"), "pages without templates are not read"
        for task in tasks:
            assert store.memo.find("templates", store.memo.compute_key(task.inputs()))
        assert collect_templates(store, plan, launch) == tables[-1]
    with_templates, without_templates = tables
    assert load_table(store, with_templates).entries["b"].value == "b: {{{1}}}"
    assert without_templates is None, "the parts have the keys of a dump without templates"
