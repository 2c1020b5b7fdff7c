"""A websocket in a real vLLM that has none of its own for a text model: `--middleware echo_socket.EchoSocket`.

At `/echo` it sends back what it is sent, text and bytes, until the client closes; everything else is vLLM's.
"""


class EchoSocket:
    """ASGI middleware; see the module's first lines."""

    def __init__(self, app):
        """Stand before `app`."""
        self.app = app

    async def __call__(self, scope, receive, send):
        """Serve one request or websocket."""
        if scope["type"] != "websocket" or scope["path"] != "/echo":
            await self.app(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept", "subprotocol": next(iter(scope["subprotocols"]), None)})
        while (message := await receive())["type"] == "websocket.receive":
            await send({**message, "type": "websocket.send"})
