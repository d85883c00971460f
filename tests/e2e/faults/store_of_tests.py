"""A plug-in for the server of the tests: "disk://FOLDER" is a store whose adapters are fetched into the cache."""

import fsspec
from fsspec.implementations.local import LocalFileSystem


class DiskStore(LocalFileSystem):
    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol(path.removeprefix("disk://"))


fsspec.register_implementation("disk", DiskStore)


class Resolver:
    def resolve(self, name: str, source: str | None) -> str | None:
        return None
