"""Check that an edition fits into memory beside the current one, so that the service is not killed for memory."""

from collections.abc import Sequence

from rag_model.errors import ResourceError
from rag_model.index.sizing.amounts import gigabytes
from rag_model.serving import free_memory
from rag_model.serving.service_settings import ServiceSettings
from rag_model.store.versions.manifest import Content


def check_memory(content: Content, indexes: Sequence[str], settings: ServiceSettings) -> None:
    """Refuse to load indexes that do not fit into what is free; mapped ones need no room.

    Raises:
        ResourceError: they do not fit.
    """
    free = free_memory.free_bytes()
    if not settings.loaded or free is None:
        return
    files = [content.files.get(content.index_file(name)) for name in indexes]
    needed = sum(file.size for file in files if file is not None)
    if needed > free:
        raise ResourceError(
            f"the indexes take {gigabytes(needed)} of memory beside those that serve, and {gigabytes(free)} are free: "
            "give the service more, or serve without --in-memory"
        )
