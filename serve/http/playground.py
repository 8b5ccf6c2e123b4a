"""The playground: a page at `/` that chats with the server and shows where each token comes from.

It is made of the files in static/, which use the public API alone. They hold nothing of the server, so they need no
key; the page asks for a key if the API needs one.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Nothing from elsewhere, no inline code, no page around this one: text of a model could do nothing even as markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a new version of the server has a new page
}


def routes() -> list[Route]:
    """Returns routes of the page and its files, which are read once."""
    paths = {f"/playground/{path.name}": path for path in sorted(FOLDER.iterdir())}
    return [Route(path, endpoint(file)) for path, file in {"/": FOLDER / "index.html", **paths}.items()]


def endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    media_type = TYPES[file.suffix]

    async def answer(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return answer
