"""uvicorn itself as an engine, once for each of its HTTP parsers, with vLLM's admin routes and a record of all it served.

    python -m fakes.uvicorn_engine DIRECTORY

Each of the SERVERS listens on a Unix socket of its name in DIRECTORY and has an app of its own. `GET /_taken` asked on
that socket gives what the app has served since it was last asked.
"""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_supervisor.core.routes import DANGEROUS

ROOT = "/api"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"]
ADMIN = "admin"  # what the record says of a request that came to an admin route

# The parser, and whether there is a library for websockets; without one uvicorn serves the upgrade as a plain request.
SERVERS = {
    "httptools": ("httptools", "auto"),
    "h11": ("h11", "auto"),
    "httptools-plain": ("httptools", "none"),
    "h11-plain": ("h11", "none"),
}


def build() -> Starlette:
    """Build the app: admin routes, one that answers before it reads the body, a websocket, and a route for all else."""
    taken: list[dict[str, Any]] = []

    def note(kind: str, method: str, connection: HTTPConnection) -> dict[str, Any]:
        taken.append(
            {
                "kind": kind,
                "method": method,
                "path": connection.scope["raw_path"].decode(),
                "fields": [[name.decode(), value.decode("latin-1")] for name, value in connection.headers.raw],
                "body": "",
                "whole": False,
            }
        )
        return taken[-1]

    async def read(kind: str, request: Request) -> Response:
        entry = note(kind, request.method, request)
        with contextlib.suppress(ClientDisconnect):
            entry["body"] = (await request.body()).decode("latin-1")
            entry["whole"] = True
        return JSONResponse({"path": entry["path"]})

    async def admin(request: Request) -> Response:
        return await read(ADMIN, request)

    async def other(request: Request) -> Response:
        return await read("other", request)

    async def early(request: Request) -> Response:
        return JSONResponse({"path": note("early", request.method, request)["path"]})

    async def record(_request: Request) -> Response:
        given = taken.copy()
        taken.clear()
        return JSONResponse(given)

    async def tunnel(websocket: WebSocket) -> None:
        note("websocket", "GET", websocket)
        await websocket.accept()
        await websocket.receive()

    return Starlette(
        routes=[
            Route("/_taken", record),
            *(Route(path, admin, methods=METHODS) for path in (*sorted(DANGEROUS), "/adapters/{name}")),
            Route("/early", early, methods=METHODS),
            WebSocketRoute("/ws", tunnel),
            Route("/{rest:path}", other, methods=METHODS),
        ]
    )


def under_root(app: ASGIApp) -> ASGIApp:
    """Let the app be asked under ROOT, too, as vLLM's `--root-path` does."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = ROOT
        await app(scope, receive, send)

    return asked


def is_admin(router: Router, method: str, path: str) -> bool:
    """Say whether Starlette gives a request for `path`, decoded as uvicorn does, to an admin route.

    The root path may be the app's, as vLLM's is, or uvicorn's, which puts it before every path.
    """
    for full in (path, ROOT + path):
        scope = {"type": "http", "method": method, "path": full, "root_path": ROOT, "headers": []}
        route = next((one for one in router.routes if one.matches(scope)[0] is not Match.NONE), None)
        if isinstance(route, Route) and route.endpoint.__name__ == ADMIN:
            return True
    return False


async def main(directory: Path) -> None:
    """Serve until ended."""
    servers = []
    for name, (http, ws) in SERVERS.items():
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(directory / name))
        config = uvicorn.Config(
            under_root(build()), http=http, ws=ws, log_level="error", access_log=False, lifespan="off"
        )
        servers.append(uvicorn.Server(config).serve([sock]))
    await asyncio.gather(*servers)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
