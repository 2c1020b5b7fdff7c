"""Keys and tokens must not show in status, `config show`, events, logs, evidence bundles or logged command lines.

Rules:
* The engine's lines are redacted once, where they are taken in; whatever quotes them later quotes the redacted ones.
* A value goes when its name says that it is secret, or when it has the form of a well-known key. A word of the
  tokenizer's (`max_tokens=16`, `eos_token='</s>'`) and an expression in a traceback (`api_key=self.api_key`) stay.
* Every pattern is linear in the length of the line: it begins with a fixed word, what follows is bounded or consumes
  what it has read. A value whose closing quote or bracket is missing ends with the line.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_NOT_SECRET = re.compile(r"tokenizer|keep_?alive|ssl_?keyfile|max_\w*tokens", re.IGNORECASE)
# vLLM's options whose values are secret, as its parser spells them, and how few letters name them without doubt.
_SECRET_OPTIONS = {"--api-key": "--api-k", "--hf-token": "--hf-t"}


def is_secret_name(name: str) -> bool:
    """Say whether a variable or key of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with the values of secret ones replaced, and keys in the values of others."""
    return {name: REDACTED if is_secret_name(name) else text(value) for name, value in variables.items()}


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return a vLLM command line with the values of secret options replaced, in each of its spellings."""
    shown: list[str] = []
    hiding = False
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            name, equals, _ = argument.partition("=")
            hiding = _is_secret_option(name)
            shown.append(f"{name}={REDACTED}" if hiding and equals else text(argument))
        else:
            shown.append(REDACTED if hiding else text(argument))
    return shown


def _is_secret_option(name: str) -> bool:
    spelled = name.replace("_", "-")
    return any(full.startswith(spelled) and spelled.startswith(least) for full, least in _SECRET_OPTIONS.items())


# -- text ------------------------------------------------------------------------------------------------------------

_PART = r"[^\s,;&|<>\"'()\[\]{}]"
# A comma goes on with the value (a list of keys) unless a further name and its value stand behind it.
_BARE = rf"(?:(?:bearer|basic|digest|negotiate|token)\s{{1,4}})?{_PART}+(?:,(?![\w.-]{{1,64}}[\"']?[:=]){_PART}+)*"
_QUOTED = r"[bfr]{0,2}(?P<quote>\\{0,8}[\"'])(?:(?!(?P=quote))(?:\\.|[\s\S]))*"
_VALUE = rf"(?P<value>\[[^\]]*|\([^)]*|{_QUOTED}|{_BARE})"
# NAME=VALUE, NAME: VALUE, "NAME": "VALUE", ('NAME', 'VALUE'); the quotes may themselves be escaped.
_BETWEEN = r"(?:\\{0,8}[\"']?\s{0,4}(?:[:=]{1,2}|=>)\s{0,4}|\\{0,8}[\"']\s{0,4},\s{0,4}(?=b?\\{0,8}[\"']))"

_NOTHING = re.compile(
    r"\W*(?:none|null|nil|true|false|not|unset|missing|required|empty|str|string|\*+)?\W*", re.IGNORECASE
)
_EXPRESSION = re.compile(
    r"(?:self|cls|args|kwargs|config|envs?|os|settings|request|Optional|Union|SecretStr)[.(\[].*"
    r"|Optional|Union|SecretStr|(?:api_?key|hf_token|access_token|auth_token|token|password|secret|key)s?"
    r"|f[\"'](?:bearer )?\{.*",
    re.IGNORECASE | re.DOTALL,
)
_WORD_OF_A_SENTENCE = re.compile(
    r"(?:tokens?|auth\w*|scheme|format|headers?|prefix|credentials?|realm|errors?|keys?|type|http|security|option|flag"
    r"|argument|value|is|was|are|not|must|or|and|to|in|of|with|for|from|if|cannot|can|requires?|expects?|missing|instead)\W*",
    re.IGNORECASE,
)


def _kept(value: str) -> bool:
    return bool(_NOTHING.fullmatch(value) or _EXPRESSION.fullmatch(value))


def _kept_in_a_sentence(value: str) -> bool:
    first = value.partition(" ")[0]
    return bool(_WORD_OF_A_SENTENCE.fullmatch(first)) or _kept(first)


def _no_credential(value: str) -> bool:
    """Tell a symbol or number of a vocabulary from a credential: the bare word "token" stands before both."""
    bare = value.strip("bfr\"'\\[]() ")
    mixed = any(letter.isdigit() for letter in bare) and any(letter.isalpha() for letter in bare)
    return not (mixed and len(bare) >= 6 and re.fullmatch(r"[\w.~+/=:-]+", bare))


def _plain_hf_name(value: str) -> bool:
    return bool(re.fullmatch(r"hf_[a-z]{0,15}", value))  # hf_overrides


@dataclass(frozen=True, slots=True)
class SecretRule:
    """One kind of secret: the group `value` of `pattern` is replaced, unless `kept` says that it gives nothing away."""

    name: str
    pattern: re.Pattern[str]
    kept: Callable[[str], bool] = _kept


def _named(names: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(rf"(?:{names})(?:[_-]?\d{{1,3}})?{_BETWEEN}{_VALUE}", flags)


# Data: a spelling that leaks is one more row here, or word in a row, and one more line in the test of this table.
RULES: tuple[SecretRule, ...] = (
    SecretRule(
        "option",
        re.compile(
            r"(?<=--)(?:[a-z\d]{1,20}[_-]){0,4}(?:api[_-]?key|key|token|secret|password|passwd|passphrase|credentials?)"
            rf"(?:=|\s{{1,4}})(?P<value>{_QUOTED}|(?!-){_PART}+(?:[ ,](?!-){_PART}+)*)",
            re.IGNORECASE,
        ),
        _kept_in_a_sentence,
    ),
    SecretRule(
        "name",
        _named(
            r"(?<!--)(?:api[_-]?keys?|access[_-]?key(?:[_-]?id)?|secret[_-]?(?:access[_-]?)?keys?|private[_-]?keys?"
            r"|(?<![a-z])(?:account|auth|client|encryption|license|master|service|session|shared|signing|subscription)[_-]?key"
            r"|(?<![a-z])(?:hf|hub|auth|access|api|bearer|client|csrf|deploy|github|gitlab|id|login|oauth|personal|refresh"
            r"|registry|secret|security|service|session|wandb)[_-]?token"
            r"|secrets?|passw(?:or)?ds?|passphrase|credentials?|x[_-]amz[_-]signature|authorization|x[_-]auth)"
        ),
    ),
    SecretRule("name in capitals", _named(r"(?<=[A-Z\d])_(?:KEY|TOKEN|SECRET|PASS|PWD)", re.RegexFlag(0))),
    SecretRule("pwd", _named(r"(?<![A-Za-z])pwd"), lambda value: _kept(value) or value.lstrip("\"'").startswith("/")),
    SecretRule("signed address", re.compile(r"(?<=[?&])(?:sig|signature|key|token|code)=(?P<value>[^\s&\"'<>]+)")),
    SecretRule("cookie", re.compile(rf"(?<![\w-])(?:set-)?cookie{_BETWEEN}(?P<value>[^\r\n]+)", re.IGNORECASE)),
    SecretRule("token", _named(r"(?<![\w-])token"), _no_credential),
    SecretRule("bearer", re.compile(r"\bbearer\s{1,4}(?P<value>[\w.~+/=:-]{2,})", re.IGNORECASE), _kept_in_a_sentence),
    SecretRule("userinfo", re.compile(r"://(?P<value>[^/\s@\"'<>]+)@")),
    SecretRule("private key", re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?P<value>.+)")),
    SecretRule("json web token", re.compile(r"(?<![\w-])(?P<value>eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)")),
    SecretRule("hugging face", re.compile(r"(?<![A-Za-z\d])(?P<value>(?:hf|api_org)_[A-Za-z\d]{6,})"), _plain_hf_name),
    SecretRule(
        "prefix",
        re.compile(
            r"(?<![A-Za-z\d])(?P<value>sk-(?!learn\b)[\w-]{6,}|[rs]k_(?:live|test)_\w{8,}|gsk_\w{16,}|gh[pousr]_\w{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{12,}|xox[abeprs]-[\w-]{8,}|AIza[\w-]{30,}|nvapi-[\w-]{12,}|r8_\w{16,}"
            r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z\d]{12,})"
        ),
    ),
)

# Few of an engine's lines hold any of these, and plain searches cost a tenth of a pattern: it prints a line a request.
_HINTS = (
    "key",
    "token",
    "secret",
    "passw",
    "passph",
    "pwd",
    "_pass",
    "credential",
    "auth",
    "signature",
    "cookie",
    "bearer",
    "://",
    "sig=",
    "code=",
    "eyj",
    "hf_",
    "api_org_",
    "sk-",
    "sk_",
    "rk_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat",
    "glpat",
    "xox",
    "aiza",
    "nvapi",
    "r8_",
    "akia",
    "asia",
    "abia",
    "acca",
)
_OPENING = re.compile(r"[(\[]|[bfr]{0,2}\\{0,8}[\"']")


def text(line: str) -> str:
    """Return a line with each value that `RULES` finds replaced; escape sequences must have been removed from it."""
    lower = line.lower()
    if not any(hint in lower for hint in _HINTS):
        return line
    for rule in RULES:
        line = rule.pattern.sub(partial(_replaced, rule), line)
    return line


def lines(block: str) -> str:
    """Return a text of several lines, each redacted."""
    return "".join(text(line) for line in block.splitlines(keepends=True))


def _replaced(rule: SecretRule, found: re.Match[str]) -> str:
    value = found["value"]
    if rule.kept(value):
        return found[0]
    opening = _OPENING.match(value)
    start = found.start("value") - found.start()
    return f"{found[0][:start]}{opening[0] if opening else ''}{REDACTED}{found[0][start + len(value) :]}"
