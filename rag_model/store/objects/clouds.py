"""The clouds that can hold a store, by the scheme of its URL: the client and the file system of each."""

from dataclasses import dataclass
from typing import Any

from rag_model.extras import require


@dataclass(frozen=True, slots=True)
class Cloud:
    """One vendor's object store, or one that speaks its language; the Hub's repositories are only read."""

    extra: str  # of bookwheel, that installs its client
    client: str  # the module that must be installed
    kind: str  # `module:class` of the file system

    def connected(self) -> Any:
        """Return its file system; credentials and endpoint come from the environment.

        Raises:
            MissingExtraError: its client is not installed.
        """
        require(self.client, self.extra)
        module, _, name = self.kind.partition(":")
        return getattr(require(module, self.extra), name)(use_listings_cache=False)


_S3 = Cloud("s3", "s3fs", "rag_model.store.objects.s3:S3")
_GCS = Cloud("gcs", "google.cloud.storage", "rag_model.store.objects.gcs:GCS")
_HUB = Cloud("hub", "huggingface_hub", "rag_model.store.objects.hub:Hub")
_AZURE = Cloud("azure", "azure.storage.blob", "rag_model.store.objects.azure:Azure")
CLOUDS = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
    "hf": _HUB,
}


def cloud_of(url: str) -> Cloud | None:
    """Return the cloud that a URL names; None: it names a disk, or a protocol that fsspec knows.

    >>> cloud_of("gs://bucket/library").extra
    'gcs'
    """
    scheme, separator, _ = url.partition("://")
    return CLOUDS.get(scheme) if separator else None
