"""How `vllm serve` takes a command line apart: which words are options, which are their values, which is the model.

Rules (vLLM 0.32: vllm/utils/argparse_utils.py, class FlexibleArgumentParser, over Python's argparse):
* `_` counts as `-` in option names; `--port 9` and `--port=9` are the same; an unambiguous beginning of a name counts
  as the name; the last one wins; the first free-standing word is the model.
* `--a.b value` and `--a.b=value` are parts of a JSON value; `-O3` and `-O 3` are one option.
* The entries of a YAML file become words: a false one is dropped, a list is an option with many values.
* Options we do not know are vLLM's to judge (its version may be another one): words after them are taken as theirs.
  A mistake is ours to tell only in an option the caller reads; every other mistake is left for vLLM to tell.
"""

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core import vllm_options
from vllm_supervisor.core.errors import UsageError

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Words:
    """A command line taken apart: the model, and for each option of interest the values of its last occurrence.

    An option without a value that was given stands there with no values; one that was taken back (`--no-…`) does not.
    """

    model: str | None
    given: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    values: str  # "none", "one", "maybe" (one or none), "many" (one or more)
    negative: bool = False


@functools.cache
def _spellings() -> dict[str, _Option]:
    table: dict[str, _Option] = {}
    groups = {
        "none": vllm_options.FLAGS,
        "one": vllm_options.ONE,
        "maybe": vllm_options.MAYBE,
        "many": vllm_options.MANY,
    }
    for values, entries in groups.items():
        for entry in entries.split():
            first, *others = entry.split("|")
            name = first.replace("[no-]", "")
            table.update(dict.fromkeys((name, *others), _Option(name, values)))
            if name != first:
                table[f"--no-{name[2:]}"] = _Option(name, values, negative=True)
    return table


def from_yaml(values: Mapping[str, Any]) -> list[str]:
    """Write the entries of a YAML file as words, as `FlexibleArgumentParser.load_config_file` does."""
    words: list[str] = []
    for key, value in values.items():
        name = f"--{key}"
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, list):
            words += [name, *map(str, value)] if value else []
        else:
            words += [name, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def take_apart(words: Sequence[str], interest: Collection[str]) -> Words:
    """Take the words after `vllm serve` apart; raise UsageError for a mistake in an option of `interest`."""
    model: str | None = None
    given: dict[str, Sequence[str]] = {}
    for part in _parts(words, interest):
        option = part.option
        if option is None:
            model = model or next(iter(part.values), None)
            continue
        if option.name not in interest:
            continue
        if option.values == "none" and part.explicit:
            raise UsageError(f"{part.word}: {option.name} takes no value")
        if option.values in {"one", "many"} and not part.values:
            raise UsageError(f"{part.word} needs a value")
        if option.negative:
            given.pop(option.name, None)
        else:
            given[option.name] = part.values
    return Words(model, given)


def substitute(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Give the options named in `values` these values: in place where they are given, else at the end of the options.

    In place, because a word behind a removed option could become a value of the option before it; and only once each,
    because vLLM warns of duplicates. An empty value is written with `=`.
    """
    made = list(words)
    missing = dict(values)
    for part in reversed(list(_parts(words, values))):
        if part.option is not None and part.option.name in values:
            made[part.begin : part.end] = _written(part.option.name, values[part.option.name])
            missing.pop(part.option.name, None)
    end = made.index("--") if "--" in made else len(made)
    made[end:end] = [word for name, value in missing.items() for word in _written(name, value)]
    return made


def without(words: Sequence[str], names: Collection[str], *, model: bool = False) -> tuple[list[str], set[str]]:
    """Take options out, wherever they stand; return what is left, and the names of all options that were given.

    `model`: the free-standing word that is the model too; it has to come first then, for behind a removed option it
    could become a value of the one before.
    """
    left, given = list(words), set()
    parts = list(_parts(words, names))
    free = next((part for part in parts if part.option is None), None) if model else None
    for part in reversed(parts):
        if part.option is not None:
            given.add(part.option.name)
        if part is free or (part.option is not None and part.option.name in names):
            del left[part.begin : part.end]
    return left, given


def _written(name: str, value: str) -> list[str]:
    return [name, value] if value else [f"{name}="]


@dataclass(frozen=True, slots=True)
class _Part:
    """An option with its values, or (`option` None) free-standing words; `begin` and `end` are places in the words."""

    begin: int
    end: int
    word: str
    option: _Option | None
    values: Sequence[str]
    explicit: bool = False  # the value hangs on the option by `=`


def _parts(all_words: Sequence[str], interest: Collection[str]) -> Iterator[_Part]:
    """Yield the parts of a command line in their order; options we do not know are left out, with what follows them."""
    places, words = _normalised(all_words)
    places.append(len(all_words))
    index = 0
    while index < len(words):
        begin, word = index, words[index]
        index += 1
        if word == "--":
            yield _Part(places[begin], len(all_words), word, None, words[index:])
            return
        if _is_value(word):
            yield _Part(places[begin], places[begin] + 1, word, None, [word])
            continue
        option, explicit = _recognised(word, interest)
        following = _following(words, index)
        if explicit is not None:
            taken = 0
        elif option is None or option.values == "many":
            taken = following
        elif option.values == "none":
            taken = 0
        else:
            taken = min(following, 1)
        values = words[index : index + taken] if explicit is None else [explicit]
        index += taken
        if option is not None:
            yield _Part(places[begin], places[index - 1] + 1, word, option, values, explicit is not None)


def _normalised(words: Sequence[str]) -> tuple[list[int], list[str]]:
    """Put dashes into names, and take out what vLLM rewrites before argparse sees it; the places are those before."""
    places: list[int] = []
    kept: list[str] = []
    skip = False
    for place, (word, after) in enumerate(itertools.pairwise([*words, ""])):
        if skip:
            skip = False
            continue
        name, equals, value = word.partition("=")
        if word == "-O":
            skip = after in {"0", "1", "2", "3"}
            continue
        if word.startswith("-O"):
            continue
        if word.startswith("-") and "." in name:
            skip = not equals
            continue
        places.append(place)
        kept.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return places, kept


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or bool(_NEGATIVE_NUMBER.fullmatch(word))


def _following(words: Sequence[str], index: int) -> int:
    """Count the values that stand from `index` on before the next option."""
    count = 0
    while index + count < len(words) and _is_value(words[index + count]):
        count += 1
    return count


def _recognised(word: str, interest: Collection[str]) -> tuple[_Option | None, str | None]:
    """Return the option a word names (None: unknown to us) and the value that hangs on it by `=`."""
    table = _spellings()
    if word in table:
        return table[word], None
    name, equals, value = word.partition("=")
    explicit = value if equals else None
    if name in table:
        return table[name], explicit
    if not word.startswith("--") and word[:2] in table:
        return table[word[:2]], word[2:]
    matches = [spelling for spelling in table if spelling.startswith(name)]
    if len({table[match] for match in matches}) == 1:
        return table[matches[0]], explicit
    if any(table[match].name in interest for match in matches):
        raise UsageError(f"{name} could mean {' or '.join(sorted(matches))}; write it out")
    return None, explicit
