"""A middleware of the user's that reads the client's address: `--middleware told_client.ToldClient`.

At `/client` it answers who asks and by which scheme. `/health` fails without an address, as with a middleware that limits
by address; everything else is vLLM's.
"""

import json


class ToldClient:
    """ASGI middleware; see the module's first lines."""

    def __init__(self, app):
        """Stand before `app`."""
        self.app = app

    async def __call__(self, scope, receive, send):
        """Serve one request or websocket."""
        if scope["type"] != "http" or scope["path"] not in {"/client", "/health"}:
            await self.app(scope, receive, send)
            return
        host = scope["client"][0]
        if scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        body = json.dumps({"host": host, "scheme": scope["scheme"]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
