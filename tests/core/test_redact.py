"""The table of secrets: many spellings that must go, many lines that must stay, and lines made to be slow."""

import time

import pytest

from vllm_supervisor.core import redact

# Each holds "topsecret7" (or two of them) in a spelling that an engine, a library or a shell may print.
SPELLINGS = [
    "api_key=topsecret7",
    "api_key = topsecret7",
    "api_key: topsecret7",
    "API_KEY=topsecret7 started",
    "apikey=topsecret7",
    "apiKey: 'topsecret7',",
    "x-api-key: topsecret7",
    "VLLM_API_KEY=topsecret7",
    "OPENAI_API_KEY='topsecret7'",
    "ValueError: bad api_key=topsecret7",
    "non-default args: {'api_key': ['topsecret7'], 'port': 9}",
    "non-default args: {'api_key': ['topsecret7', 'topsecret7b'], 'port': 9}",
    "Namespace(api_key=['topsecret7'], port=9)",
    "Namespace(api_key=topsecret7, port=9)",
    "api_key=abc,topsecret7,def",
    "keys: api_key=topsecret7,max_tokens=16",
    '{"api_key": "topsecret7"}',
    '{"api_key":"topsecret7","model":"m"}',
    '{\\"api_key\\": \\"topsecret7\\"}',
    '{"password": "ab\\"topsecret7"}',
    "'api_key': b'topsecret7'",
    'api_key="topsecret7',
    "api_key=[topsecret7",
    "headers=[(b'x-api-key', b'topsecret7'), (b'host', b'a')]",
    "headers=[(b'authorization', b'Bearer topsecret7')]",
    "('Authorization', 'Bearer topsecret7')",
    "Authorization: Bearer topsecret7",
    "authorization: bearer topsecret7",
    "Authorization: topsecret7",
    "Authorization: Basic topsecret7",
    "Proxy-Authorization: Basic topsecret7==",
    "{'Authorization': 'Bearer topsecret7'}",
    "sent Bearer topsecret7 to the hub",
    "password: topsecret7",
    "password=topsecret7",
    "Password = 'topsecret7'",
    "db_password=topsecret7",
    "passwd:topsecret7",
    "passphrase: topsecret7",
    "DB_PASS=topsecret7",
    "pwd=topsecret7",
    "secret=topsecret7",
    "client_secret: topsecret7",
    "AWS_SECRET_ACCESS_KEY=topsecret7",
    "aws_access_key_id = topsecret7",
    "private_key=topsecret7",
    "AZURE_KEY=topsecret7",
    "credentials=topsecret7",
    "--api-key topsecret7 --port 9",
    "--api-key=topsecret7",
    "--api_key topsecret7",
    "--api-key abc topsecret7 --port 9",
    "--api-key 'topsecret7'",
    "--hf-token topsecret7",
    "--password topsecret7",
    "usage: vllm serve [--api-key topsecret7] [--port 9]",
    "vllm: error: unrecognized arguments: --my-api-key topsecret7",
    "HF_TOKEN=topsecret7",
    "export HUGGING_FACE_HUB_TOKEN=topsecret7",
    'hf_token="topsecret7"',
    "access_token=topsecret7",
    "auth_token: topsecret7",
    "token=topsecret7",
    "?token=topsecret7&x=1",
    "GET /v1/models?api_key=topsecret7&x=1 HTTP/1.1",
    "https://x.blob.net/m?sv=1&sig=topsecret7%2B",
    "https://x.s3/m?X-Amz-Signature=topsecret7&X-Amz-Date=1",
    "https://user:topsecret7@example.org/x",
    "cannot connect to postgres://user:topsecret7@db:5432/x",
    "git+https://topsecret7@github.com/a/b",
    "Cookie: session=topsecret7; b=1",
    "set-cookie: id=topsecret7",
    "using key sk-topsecret7",
    "sk-proj-topsecret7_abc",
    "hf_topsecret7AbCdEf",
    "ghp_topsecret7abcdefghijklmnop",
    "github_pat_topsecret7abcdefghijk",
    "glpat-topsecret7abc",
    "xoxb-topsecret7-1",
    "nvapi-topsecret7abc",
    "eyJhbGciOiJIUzI1NiJ9.topsecret7.abc",
    "-----BEGIN RSA PRIVATE KEY-----topsecret7",
    "retry with api-key => topsecret7",
    "WANDB_API_KEY: topsecret7",
    "token: topsecret7",
]

UNCHANGED = [
    "max_tokens=16",
    "max_num_batched_tokens=8192, max_model_len=2048",
    "num_prompt_tokens: 5, num_valid_tokens: 7",
    "token ids: [1, 2, 3]",
    "prompt_token_ids=[1, 2, 3] token_ids: [4]",
    "token: 17",
    "Unexpected token: '<eos>'",
    "bos_token='<s>', eos_token='</s>', pad_token: [PAD], eos_token_id=2",
    "tokenizer=/models/x, tokenizer_mode='auto', tokenizer_revision=None",
    "loaded tokenizer in 3 s",
    "Avg prompt throughput: 5.0 tokens/s, GPU KV cache usage: 0.1%",
    "KeyError: 'model'",
    "key=value cache_key=abc sort_key: name",
    "password-less login is not supported",
    "api_key=None, hf_token=None, password=''",
    "'api_key': [], 'hf_token': null",
    "allow_credentials: False, use_auth_token=True",
    "error: argument --api-key: expected at least one argument",
    "set --api-key or VLLM_API_KEY to protect the server",
    "the option --api-key is deprecated",
    "HF_TOKEN is not set; set HF_TOKEN",
    "missing bearer token",
    "ssl_keyfile=/etc/ssl/private/server.pem",
    "--ssl-keyfile /etc/ssl/server.key --tokenizer /models/x --max-tokens 5",
    "PWD=/home/user",
    '  File "/opt/vllm/lib/python3.11/site-packages/vllm/entrypoints/auth/token.py", line 120, in main',
    "    client = Client(api_key=self.api_key, token=token, password=os.environ['X'])",
    "    def __init__(self, api_key: Optional[str] = None, token: str | None = None):",
    "    headers = {'Authorization': f'Bearer {token}'}",
    "Traceback (most recent call last):",
    "hf_overrides={}, hf_config_path=None, hf_hub_download",
    "sk-learn-compatible and disk-12345678, task-force-1234",
    "https://huggingface.co/org/model/resolve/main/config.json?download=true",
    "tcp://127.0.0.1:5555 unix:/run/x.sock user@example.org",
    "OSError: [Errno 98] Address already in use",
    "the author: somebody; authentication failed; keyboard interrupt",
    "TypeError: got an unexpected keyword argument 'api_key'",
    "Error code: 401 - invalid api key",
]


@pytest.mark.parametrize("line", SPELLINGS)
def test_a_secret_in_any_spelling_is_replaced(line: str) -> None:
    """Nothing of the value is left, the line says that something was removed, and redacting twice changes nothing."""
    shown = redact.text(line)
    assert "topsecret7" not in shown
    assert redact.REDACTED in shown
    assert redact.text(shown) == shown


@pytest.mark.parametrize("line", UNCHANGED)
def test_a_line_without_a_secret_is_unchanged(line: str) -> None:
    """Numbers of tokens, paths, code and advice are what a person needs of an error."""
    assert redact.text(line) == line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--api-key k1 k2 --port 9", "--api-key <redacted> --port 9"),
        ('{"api_key": "x", "model": "m"}', '{"api_key": "<redacted>", "model": "m"}'),
        ("{'api_key': ['a', 'b'], 'port': 9}", "{'api_key': [<redacted>], 'port': 9}"),
        ("api_key=abc,max_tokens=16", "api_key=<redacted>,max_tokens=16"),
        ("https://u:p@host/x?a=1", "https://<redacted>@host/x?a=1"),
        ("https://h/x?api_key=a&b=1", "https://h/x?api_key=<redacted>&b=1"),
    ],
)
def test_what_stands_around_a_secret_stays(line: str, shown: str) -> None:
    """Only the value goes: names, quotes and what follows are kept."""
    assert redact.text(line) == shown


SLOW = 64 * 1024
HOSTILE = [
    piece * (SLOW // len(piece))
    for piece in (
        "a", "-", "--", "_", " ", "\\", '"', "'", "[", "(", ":", "=", "://", "@", "eyJ", "eyJa.", "api_key", "api_key=",
        "api_key='", 'api_key="', "api_key=[", "api_key=(", "api_key\\", "api_key: ", "--api-key ", "--a-a-a-api-key=",
        "token=", "token=a", "token='", "bearer ", "bearer\t", "authorization: bearer ", "password", "key", "sk-", "hf_",
        "AKIA", "cookie", "cookie=", "-----BEGIN ", "://a", "://a:b", "x,", "api_key=x,", "secret_", "id_token", "A_KEY", "\\'api_key\\'",
        "api_key=f'", "AIza", "xoxb-", "?sig=", "pwd=",
    )
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:12]))
def test_a_line_made_to_be_slow_is_not(line: str) -> None:
    """The work is linear: a quadratic pattern would need ten seconds and more for each of these."""
    began = time.process_time()
    redact.text(line)
    assert time.process_time() - began < 2.0


def test_a_block_keeps_its_lines() -> None:
    """Each line is redacted by itself; the ends of lines stay as they were."""
    assert redact.lines("a\r\napi_key=x\nb") == "a\r\napi_key=<redacted>\nb"
