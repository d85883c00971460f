"""The console's files: read once, kept in memory, sent with headers that let browsers keep them.

The page itself is requested each time (by its ETag); everything else has the digest of all files in its path, so
that browsers may keep it for good and never mix the files of two versions.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PLACEHOLDER = "{{assets}}"

# Nothing from other hosts, no code or style inside the page, no HTML made from strings (trusted types), no frame
# around it.
_SECURITY = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the console."""

    content: bytes
    compressed: bytes
    """The content, gzipped."""
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> Asset:
        """Make an asset from a file's content and the end of its name."""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), _TYPES[suffix], etag)

    def respond(self, request: Request, cache_control: str) -> Response:
        """The answer: nothing but headers if the client has it already."""
        headers = {**_SECURITY, "ETag": self.etag, "Cache-Control": cache_control, "Vary": "Accept-Encoding"}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        body = self.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = self.compressed, "gzip"
        return Response(body, headers=headers, media_type=self.media_type)


class Assets:
    """All files of the console."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.version = digest.hexdigest()[:16]
        """Digest in the path of all files but the page."""
        page = files.pop(PAGE).decode().replace(_PLACEHOLDER, f"console/assets/{self.version}")
        self.page = Asset.of(page.encode(), ".html")
        self._files = {name: Asset.of(content, Path(name).suffix) for name, content in files.items()}

    def find(self, version: str, name: str) -> Asset | None:
        """The file of that name; None for another version's."""
        return self._files.get(name) if version == self.version else None
