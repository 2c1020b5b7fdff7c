"""What engines print when they fail, and what it means: one row a signature, easy to add to.

Rules:
* A row is matched against the first error block of an incarnation (or kernel log lines), and only once the engine is
  over: some of these lines also stand in the log of a start that succeeds.
* Of the rows found in a block the one that begins first wins: the first exception is the root, later ones wrap it.
  A `general` row names a family or a wrapper and counts only if no exact row is found.
* Lines that announce a retry are no roots and are left out of the search.
* Not here on purpose, because they do not end an engine: "No available shared memory broadcast block found",
  "Triton kernel JIT compilation during inference", "leaked shared_memory objects".
* A pattern may capture `detail`: the one thing worth quoting. Values in a usage line are never captured: they may be keys.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class StartPhase(StrEnum):
    """Whether an incarnation had become ready when it ended."""

    LOADING = "loading"
    SERVING = "serving"


class Cause(StrEnum):
    """Why an engine ended: the fixed set that metrics and ledgers use."""

    REQUESTED = "requested"
    EXITED = "exited"  # by itself, with some status
    PART_DIED = "part_died"  # EngineCore or a worker died first
    USAGE = "usage"
    NOT_EXECUTABLE = "not_executable"
    CRASHED = "crashed"  # a fault of the program: SIGSEGV, SIGABRT …
    KILLED = "killed"  # a signal from outside, sender unknown
    OUT_OF_MEMORY = "out_of_memory"
    SHM_FULL = "shm_full"
    GPU_LOST = "gpu_lost"


class Repeat(StrEnum):
    """Whether the next start would meet the same failure."""

    DETERMINISTIC = "deterministic"  # it would
    TRANSIENT = "transient"  # it may well not
    SPECIAL = "special"  # only if something outside the engine changes first


@dataclass(frozen=True, slots=True)
class Signature:
    """One known failure.

    `phase` None: whenever. `retries`: how many more starts this failure is worth; None leaves it to the general
    budgets. `unified_retries` replaces it where CPU and GPU share one memory. `backoff` (first, most; seconds): waits
    of its own, for what is outside the machine. `outside_only`: only a new container or a reboot helps. `cause` None:
    the exit status tells it.
    """

    id: str
    pattern: str
    repeat: Repeat
    phase: StartPhase | None
    sentence: str
    mend: str
    source: str
    retries: int | None = None
    unified_retries: int | None = None
    backoff: tuple[float, float] | None = None
    outside_only: bool = False
    general: bool = False
    kernel: bool = False
    cause: Cause | None = None

    @property
    def label(self) -> str:
        """The class of the failure in two or three words, such as "unknown option"; fixed text, fit for anybody."""
        return self.id.replace("-", " ")

    def tell(self, text: str) -> str:
        """Say what happened in one sentence, with the detail found in `text` (at most 200 characters of it)."""
        found = re.search(self.pattern, text)
        detail = found.groupdict().get("detail") if found else None
        return f"{self.sentence}: {' '.join(detail.split())[:200]}" if detail else self.sentence


_D, _T, _S = Repeat.DETERMINISTIC, Repeat.TRANSIENT, Repeat.SPECIAL
_LOADING, _SERVING = StartPhase.LOADING, StartPhase.SERVING
_MEASURED = "measured on vLLM 0.32"
_FREE_MEMORY = "stop what else uses the memory, or lower --gpu-memory-utilization or --max-model-len"
_SHM = "free /dev/shm (leftovers of earlier runs) or give it more room (--shm-size, --ipc=host)"

# fmt: off
SIGNATURES: tuple[Signature, ...] = (
    # -- the command line and the configuration
    Signature("unknown-option", r"error: unrecognized arguments:(?:\s+[^-\s]\S*)*(?:\s+(?P<detail>--?[A-Za-z][\w.-]*))?", _D, _LOADING,
              "the engine does not know an argument it was given", "correct the command line; `vllm serve --help=all` lists what this version knows",
              f"{_MEASURED}; vllm-project/vllm/issues/22072", retries=0),
    Signature("bad-option-value", r"error: argument (?P<detail>--?[A-Za-z][\w./-]*): ", _D, _LOADING,
              "the engine refuses the value of an option", "correct the value; the engine's lines above say what it takes", _MEASURED, retries=0),
    Signature("missing-argument", r"error: the following arguments are required: (?P<detail>[^\n]+)", _D, _LOADING,
              "an argument is missing", "add it to the command line", _MEASURED, retries=0),
    Signature("config-invalid", r"validation errors? for \w+(?:\s+Value error, (?P<detail>[^\[\n]+))?", _D, _LOADING,
              "the engine refuses its configuration", "correct the option that is named", _MEASURED, retries=0, general=True),
    Signature("import-failed", r"(?:^|\s)(?P<detail>(?:ModuleNotFoundError|ImportError): [^\n]+)", _D, _LOADING,
              "the engine's Python environment is broken", "repair the environment vLLM is installed in", _MEASURED, retries=1, general=True),
    Signature("numa-nodes", r"Not enough allowed NUMA nodes", _D, _LOADING,
              "there are fewer NUMA nodes than CPU workers", "lower the tensor, pipeline or data parallel size", _MEASURED, retries=0),
    Signature("ipc-path-too-long", r"ipc path [\s\S]{0,400}?longer than 107", _D, _LOADING,
              "a socket path of the engine is too long", "set VLLM_RPC_BASE_PATH or TMPDIR to a shorter directory", "zmq ipc transport: 107 bytes", retries=0),
    # -- the model and the hub
    Signature("model-invalid", r"Invalid repository ID or local directory specified(?::\s+'(?P<detail>[^'\n]+)')?", _D, _LOADING,
              "the model is neither a repository nor a directory with a configuration", "check the path or the name of the model", f"{_MEASURED}; vllm-project/vllm/pull/13724", retries=0),
    Signature("model-path", r"Repo id must be in the form(?:[^\n]*?: '(?P<detail>[^'\n]+)')?", _D, _LOADING,
              "the model's directory does not exist", "check the path of the model", f"{_MEASURED}; vllm-project/vllm/issues/13510", retries=0),
    Signature("model-config-missing", r"no config file found|does not appear to have a file named config\.json", _D, _LOADING,
              "the model's directory holds no config.json", "check that the download of the model is complete", "vllm-project/vllm/issues/17877", retries=0),
    Signature("model-not-found", r"\b404 Client Error|\bRepositoryNotFoundError|\bRevisionNotFoundError|is not a local folder and is not a valid model identifier", _D, _LOADING,
              "the model hub does not know this model or revision", "check the model's name and revision, and HF_TOKEN if it is private", "huggingface_hub utils/_http.py", retries=0),
    Signature("hub-denied", r"\b40[13] Client Error|\bGatedRepoError|(?i:gated repo)", _D, _LOADING,
              "the model hub refuses access to this model", "accept the model's licence and set HF_TOKEN, or check the model's name", "opea-project/GenAIExamples/issues/2237", retries=0),
    Signature("hub-offline", r"outgoing traffic has been disabled|(?i:offline mode is enabled)", _D, _LOADING,
              "the model is not in the local cache and downloads are switched off", "unset HF_HUB_OFFLINE for the download, or give the path of a local model", _MEASURED, retries=0),
    Signature("hub-unreachable", r"\b429 Client Error|\b50[0234] Server Error|MaxRetryError|ConnectTimeout|NameResolutionError|Temporary failure in name resolution|check your (?:internet )?connection", _T, _LOADING,
              "the model hub cannot be reached or limits the rate", "if the model is in the local cache, HF_HUB_OFFLINE=1 starts without the hub", "vllm-project/vllm/issues/24541; vllm-project/vllm/pull/43768",
              retries=8, backoff=(60.0, 900.0)),
    Signature("architecture-unsupported", r"Model architectures? [\s\S]{0,300}?(?:not supported|was supported in vLLM until)", _D, _LOADING,
              "this version of vLLM does not support the model's architecture", "use a vLLM version or a plugin that does", "vllm-project/vllm/pull/14200", retries=0),
    Signature("architecture-inspection", r"Model architectures [\s\S]{0,300}?failed\s+to be inspected", _T, _LOADING,
              "the model's code could not be loaded", "read the engine's lines above for the inner error", "vLLM model_executor/models/registry.py", retries=1, general=True),
    # -- devices and drivers
    Signature("no-device", r"Failed to infer device type", _D, _LOADING,
              "the engine found no device to run on", "check the driver (nvidia-smi) and that the device is passed into the container", "vllm-project/vllm/pull/14200", retries=1),
    Signature("bfloat16", r"Bfloat16 is only supported on GPUs with compute capability|with compute capability of at least 8\.0", _D, _LOADING,
              "this GPU is too old for bfloat16", "add --dtype half", "vLLM platforms/cuda.py", retries=0),
    Signature("too-few-gpus", r"world_size[\s\S]{0,200}?(?:less than|exceeds)[\s\S]{0,80}?gpu|invalid device ordinal|local.rank \d+ is out of\s+bounds", _D, _LOADING,
              "more GPUs are asked for than can be seen", "lower the tensor parallel size, or check CUDA_VISIBLE_DEVICES and that no GPU vanished", "vllm-project/vllm/issues/15217", retries=0),
    Signature("driver-mismatch", r"\bError 80[34]\b", _D, _LOADING,
              "the CUDA libraries do not fit the driver", "use an image built for this driver, or update the driver", "vllm-project/vllm/issues/33447", retries=0),
    Signature("fabric-manager", r"\bError 802\b", _T, _LOADING,
              "the GPU fabric is not initialised yet", "check that nvidia-fabricmanager is running", "gpustack/gpustack/issues/4678", retries=10, backoff=(60.0, 60.0)),
    Signature("gpu-access-lost", r"Failed to initialize NVML: Unknown Error", _S, None,
              "the container has lost access to its GPUs", "recreate the container (a daemon-reload on the host does this)", "NVIDIA/nvidia-container-toolkit/issues/1227", retries=0, outside_only=True, cause=Cause.GPU_LOST),
    Signature("cuda-unknown", r"cudaErrorUnknown|CUDA error:? 999\b|cudart init failure: 999|CUDA unknown error", _S, None,
              "the CUDA driver is in an unknown state, as after a suspend", "reload the nvidia_uvm module or reboot", "CUDA runtime API: cudaErrorUnknown (999)", retries=1, outside_only=True, cause=Cause.GPU_LOST),
    Signature("gpu-off-the-bus", r"Xid[^\n]{0,80}: 79\b|fallen off the bus", _S, None,
              "a GPU has fallen off the bus", "reboot; if it comes again, check power and seating", "NVIDIA/open-gpu-kernel-modules/issues/1151", retries=0, outside_only=True, kernel=True, cause=Cause.GPU_LOST),
    Signature("gpu-fault", r"Xid[^\n]{0,80}?: (?P<detail>\d+)\b", _T, None,
              "the GPU driver reported a fault (Xid)", "look the Xid up in NVIDIA's list if it comes again", "anthony-chaudhary/fak/issues/6412", general=True, kernel=True),
    # -- addresses
    Signature("port-in-use", r"\[Errno 98\]", _T, _LOADING,
              "the engine's address is still taken", "end the process that holds it, or choose another", f"{_MEASURED}; vllm-project/vllm/issues/9737", retries=5, backoff=(5.0, 60.0)),
    Signature("internal-port", r"ZMQError: Address already in use|EADDRINUSE", _T, _LOADING,
              "a port the engine chose at random was taken", "nothing: the next start chooses another", "gpustack/gpustack/issues/6019", retries=2),
    # -- memory
    Signature("kv-cache-too-small", r"To serve at least one request with the model's max seq len(?:[\s\S]{0,600}?(?P<detail>the estimated maximum model length is \d+))?|larger than the maximum number of tokens that can be stored in KV cache", _D, _LOADING,
              "the KV cache is too small for one request of full length", "lower --max-model-len or raise --gpu-memory-utilization", "kaito-project/kaito/issues/2132", retries=0, unified_retries=1),
    Signature("no-cache-blocks", r"No available memory for the cache blocks|Not enough memory for \d+ blocks of KV cache", _D, _LOADING,
              "no memory is left for the KV cache", "raise --gpu-memory-utilization, or end what else uses the memory", "vllm-project/vllm/issues/17431", retries=0, unified_retries=1),
    Signature("free-memory", r"Free memory on device[\s\S]{0,200}?less than desired", _S, _LOADING,
              "less memory is free than the engine is told to use", _FREE_MEMORY, "eugr/spark-vllm-docker/issues/257; vllm-project/vllm/issues/48140", retries=1),
    Signature("memory-profiling", r"Error in memory profiling", _T, _LOADING,
              "another process released memory while the engine measured it", "nothing: the next start measures again", "vllm-project/vllm/issues/13131", retries=2),
    Signature("memory-not-back", r"(?:MemorySnapshot|mem_get_info)[\s\S]{0,2000}?CUDA error: out of memory", _T, _LOADING,
              "the memory of an earlier process has not come back yet", _FREE_MEMORY, "Blackwellboy/model-serving-minefield traps/memory/81", retries=2),
    Signature("gpu-memory-loading", r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory", _D, _LOADING,
              "the model does not fit into the GPU's memory", _FREE_MEMORY, "Blackwellboy/model-serving-minefield/pull/53", retries=1),
    Signature("gpu-memory-serving", r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory", _T, _SERVING,
              "the GPU's memory ran out while serving", "lower --gpu-memory-utilization or --max-num-batched-tokens", "vllm-project/vllm/issues/34643"),
    Signature("driver-memory", r"NV_ERR_NO_MEMORY", _S, None,
              "the GPU driver found no memory", _FREE_MEMORY, "vllm-project/vllm/issues/56824", kernel=True),
    # -- shared memory and files
    Signature("shm-nccl", r"(?:/dev/shm)/nccl-[\s\S]{0,400}?No space left on device", _S, None,
              "the shared memory (/dev/shm) has no room for NCCL", _SHM, "llm-d/llm-d/issues/352", retries=1, cause=Cause.SHM_FULL),
    Signature("shm-space", r"Insufficient space in /dev/shm|(?:vllm_offload_|SharedOffloadRegion)[\s\S]{0,2000}?\[Errno 14\]", _S, None,
              "the shared memory (/dev/shm) has too little room", _SHM, "vllm-project/vllm/issues/54002", retries=1, cause=Cause.SHM_FULL),
    Signature("disk-full", r"\[Errno 28\]", _D, None,
              "a disk is full", "free space in the cache and temporary directories", "errno(3): ENOSPC", retries=0),
    Signature("compile-cache", r"corrupted compilation artifact|failed to get the hash of the compiled graph|(?m:torch_compile_cache[\s\S]{0,4000}?^(?:.*\] )?AssertionError)", _D, _LOADING,
              "the compile cache is damaged", "remove ~/.cache/vllm/torch_compile_cache (or the one below VLLM_CACHE_ROOT)", "ls1intum/edutelligence/issues/579; vllm-project/vllm/issues/24915", retries=0),
    # -- starting takes too long, or is broken off
    Signature("start-timeout", r"Timed out waiting for engine core processes to\s+start|to send initial message on input socket", _T, _LOADING,
              "the engine's own limit for its start ran out", "raise VLLM_ENGINE_READY_TIMEOUT_S; a second start finds warm caches", "vllm-project/vllm/issues/48031", retries=1),
    Signature("engine-core-start", r"(?:Engine core initialization failed|Frontend process failed during engine core initialization)", _T, _LOADING,
              "the engine core failed to start and the cause is not in the block kept", "read the engine's earlier lines", "vllm-project/vllm/issues/17618", retries=1, general=True),
    Signature("interrupted", r"KeyboardInterrupt: terminated", _S, _LOADING,
              "somebody else sent the loading engine a SIGTERM", "find the other watchdog or probe that did", "vllm-project/vllm/issues/17386", cause=Cause.KILLED),
    # -- running
    Signature("part-died", r"(?:Engine core|Worker) proc(?:ess)?\b[^\n]*?\bdied unexpectedly|EngineCore encountered a fatal error|EngineDeadError", _T, None,
              "a part of the engine died and the rest shut down", "read the engine's lines above for the cause", f"{_MEASURED}; vllm-project/vllm/issues/48966", general=True, cause=Cause.PART_DIED),
    Signature("rpc-timeout", r"RPC call to (?P<detail>\w+) timed\s?out|execute_model timed out", _T, None,
              "a step took longer than the engine's own limit", "raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS if kernels are compiled while serving", "eugr/spark-vllm-docker/issues/321"),
    Signature("illegal-access", r"illegal memory access|Process group watchdog thread terminated with exception", _T, None,
              "a GPU kernel accessed memory it must not", "if it comes again within minutes, look for one request that causes it", "vllm-project/vllm/issues/28028"),
    Signature("nccl-timeout", r"Watchdog caught collective operation timeout", _T, None,
              "a collective operation between workers never ended", "check the links between GPUs or nodes if it comes again", "vllm-project/vllm/issues/12625"),
)
# fmt: on

_SEARCHED = 32 * 1024
_RETRY_LINE = re.compile(r"\bretrying\b", re.IGNORECASE)


def match(block: str, phase: StartPhase, *, kernel: bool = False) -> Signature | None:
    """Find the row that names the root of `block`, or None; `kernel`: the text is kernel log, not engine output.

    The first 32 KiB are searched: a traceback is shorter, and no pattern takes long on that.
    """
    text = "\n".join(line for line in block[:_SEARCHED].splitlines() if not _RETRY_LINE.search(line))
    return min(_found(text, phase, kernel=kernel), key=lambda hit: hit[:2], default=(False, 0, None))[2]


def _found(text: str, phase: StartPhase, *, kernel: bool) -> Iterator[tuple[bool, int, Signature | None]]:
    for signature in SIGNATURES:
        if signature.kernel is kernel and signature.phase in {None, phase}:
            hit = re.search(signature.pattern, text)
            if hit:
                yield signature.general, hit.start(), signature
