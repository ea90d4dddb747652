"""`bookwheel convert-weights`: write a copy of a model whose pickled weights become safetensors."""

from dataclasses import asdict

from flows.command.reply import Common, Reply
from rag_model.encoders.convert import convert_weights as convert_folder
from rag_model.encoders.convert import fetch_pickles
from rag_model.errors import format_count
from rag_model.store.pulling.export import open_destination, parse_destination


def convert_weights(source: str, out: str, /, *, common: Common | None = None) -> Reply:
    """Write a copy of a model whose pickled weights become safetensors, bit for bit.

    A pickle can run code when it is read. It is read in a process of its own, with bounded time and
    memory and without a network, and refused if it holds anything but tensors.

    Parameters
    ----------
    source
        A folder, or NAME or NAME@REVISION of the Hugging Face Hub, with pytorch_model.bin.
    out
        A folder that does not exist yet; or hf://USER/NAME, a repository of the Hub.
    """
    destination = parse_destination(out)
    folder = fetch_pickles(source)
    with open_destination(destination, "model") as staging:
        converted = convert_folder(folder, staging, source)
    document = {**asdict(converted), "path": str(destination)}
    sizes = f"{format_count(converted.tensors, 'tensor')}, {converted.bytes:,} bytes"
    return Reply(document, f"converted {converted.source} to {destination}: {sizes}")
