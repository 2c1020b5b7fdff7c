"""A tool of the chat families whose arguments are one of two values, and the order to call it."""

TOOL = {
    "type": "function",
    "function": {
        "name": "turn",
        "strict": True,  # else the arguments may be any JSON
        "parameters": {
            "type": "object",
            "properties": {"side": {"type": "string", "enum": ["left", "right"]}},
            "required": ["side"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "turn"}}
