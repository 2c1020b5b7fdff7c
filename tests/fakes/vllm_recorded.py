"""Command lines and what vLLM 0.32.0's own parser made of them.

Recorded by running `FlexibleArgumentParser.parse_args(["serve", *words])` with vLLM's `serve` sub-command on Python
3.11, model "m" and vLLM's defaults left out. `@FILE` stands for the path of a YAML file with the text of `YAML`.
"""

from vllm_supervisor.core.cors import Cors

YAML = """\
port: 5555
model: from-yaml
served_model_name: [y1, y2]
enable-ssl-refresh: true
disable-log-stats: false
uds: null
hf-overrides: {a: 1}
ssl-certfile: /c.pem
"""

ACCEPTED: list[tuple[str, dict[str, object]]] = [
    ("m", {}),
    ("m --port 9", {"port": 9}),
    ("m --port=9", {"port": 9}),
    ("m --port 9 --port 10", {"port": 10}),
    ("m --served_model_name a b --port 9", {"served_model_name": ("a", "b"), "port": 9}),
    ("m --serv x", {"served_model_name": ("x",)}),
    ("m --ssl-keyf k --ssl_certf=c", {"ssl_keyfile": "k", "ssl_certfile": "c"}),
    ("m --host 0.0.0.0 --uds /tmp/x", {"host": "0.0.0.0", "uds": "/tmp/x"}),
    ("m --uds= --host h --port 5", {"host": "h", "port": 5}),
    ("m --uds None", {}),
    ("m --host=", {}),
    ("m --api-key a b --port 1", {"port": 1, "api_keys": ("a", "b")}),
    ("m --api_key=a", {"api_keys": ("a",)}),
    ("m --api-k a --api-key b", {"api_keys": ("b",)}),
    ("m --headless", {"headless": True}),
    ("m --head", {"headless": True}),
    ("m --grpc", {"grpc": True}),
    ("m --grpc-port 5", {"grpc_port": 5}),
    ("m --seed -1 --port 7", {"port": 7}),
    ("m --chat-template=--port --port 7", {"port": 7}),
    ("m -tp 2 --port 3", {"port": 3}),
    ("m -asc 0", {"api_server_count": 0}),
    ("m -as 2", {"api_server_count": 2}),
    ("m -dpm -dpl 2 -dp 2", {"data_parallel_size": 2, "multi_port": True}),
    ("m --no-enable-ssl-refresh", {}),
    ("m --enable-ssl-refresh", {"enable_ssl_refresh": True}),
    ("m --enable-ssl-refresh --no-enable-ssl-refresh", {}),
    ("m --enable-ssl-r", {"enable_ssl_refresh": True}),
    ("m --enable_ssl_refresh", {"enable_ssl_refresh": True}),
    ("--model x --port 3", {"model": "x", "port": 3}),
    ("--model=x --port=3", {"model": "x", "port": 3}),
    ("m --hf-overrides.port 5 --port 6", {"port": 6}),
    ("m -O3 --port 4", {"port": 4}),
    ("m -O 3 --port 4", {"port": 4}),
    ("m -O=3 --port 4", {"port": 4}),
    ("m --root-path /x", {"root_path": "/x"}),
    ("m --root_p /x", {"root_path": "/x"}),
    ("m --shutdown-timeout 5", {"shutdown_timeout": 5}),
    ("m --shutdown-t 5", {"shutdown_timeout": 5}),
    ("m --disable-log-stats", {"disable_log_stats": True}),
    ("m --disable_log_st", {"disable_log_stats": True}),
    ("m --port 8_001", {"port": 8001}),
    ("m -q awq --port 9", {"port": 9}),
    ("m -qawq --port 9", {"port": 9}),
    ("m -n2 --port 9", {"port": 9}),
    ("m -r0 --port 9", {"port": 9}),
    ("m --hf-token --port 9", {"port": 9}),
    ("m --hf-token t --port 9", {"port": 9}),
    ("m --middleware a.b --middleware c --port 9", {"port": 9}),
    ("m --lora-modules a=b c=d --port 9", {"port": 9}),
    (
        "m --ssl-cert-reqs 2 --ssl-ca-certs ca --ssl-ciphers X:Y",
        {"ssl_ca_certs": "ca", "ssl_cert_reqs": 2, "ssl_ciphers": "X:Y"},
    ),
    ("--port 5 -- m", {"port": 5}),
    ('m --allowed-origins ["*"] --port 9', {"port": 9, "cors": Cors(("*",))}),
    ("m --data-parallel-size 2 --data-parallel-rank 1", {"data_parallel_size": 2}),
    ("m --served-model-name=a --served-model-name b c", {"served_model_name": ("b", "c")}),
    (
        "--served-model-name a --config @FILE",
        {
            "model": "from-yaml",
            "served_model_name": ("a",),
            "port": 5555,
            "ssl_certfile": "/c.pem",
            "enable_ssl_refresh": True,
        },
    ),
    (
        "m --config @FILE",
        {"served_model_name": ("y1", "y2"), "port": 5555, "ssl_certfile": "/c.pem", "enable_ssl_refresh": True},
    ),
    (
        "m --config @FILE --port 7777",
        {"served_model_name": ("y1", "y2"), "port": 7777, "ssl_certfile": "/c.pem", "enable_ssl_refresh": True},
    ),
    (
        "m --port 7777 --config @FILE",
        {"served_model_name": ("y1", "y2"), "port": 7777, "ssl_certfile": "/c.pem", "enable_ssl_refresh": True},
    ),
    (
        "--config @FILE",
        {
            "model": "from-yaml",
            "served_model_name": ("y1", "y2"),
            "port": 5555,
            "ssl_certfile": "/c.pem",
            "enable_ssl_refresh": True,
        },
    ),
    ("m --config=@FILE", {}),
    (
        "--port 6 --config @FILE",
        {
            "model": "from-yaml",
            "served_model_name": ("y1", "y2"),
            "port": 6,
            "ssl_certfile": "/c.pem",
            "enable_ssl_refresh": True,
        },
    ),
    ("m --config-format hf --port 9", {"port": 9}),
    ("m --gpu-memory-utilization 0.5 --port 9", {"port": 9}),
    ("m --uds a --uds b", {"uds": "b"}),
    ("m --uds a --uds=", {}),
    ("m --api-key= --port 9", {"port": 9}),
    ("m --enable-lora --host ::1 --port 9", {"host": "::1", "port": 9}),
    ("m --no-disable-fastapi-docs --port 9", {"port": 9}),
    ("m --tokenizer - --port 9", {"port": 9}),
    ("m --max-model-len 1k --port 9", {"port": 9}),
    ("m -sc.model x --port 9", {"port": 9}),
    ("m --ho x", {"host": "x"}),
]
