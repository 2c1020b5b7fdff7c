"""Which of the machine's cards an engine uses, by PCI address.

Rules:
* What its processes hold open is the surest, then what its environment lets it see; each can only narrow the other.
* An index means a card only where the order is known: CUDA counts the fastest first unless told CUDA_DEVICE_ORDER =
  PCI_BUS_ID, and cards of one model in the order of their addresses. What cannot be told is None, never a guess.

Sources: CUDA programming guide on CUDA_VISIBLE_DEVICES, nvidia-container-toolkit on NVIDIA_VISIBLE_DEVICES,
/proc/driver/nvidia/gpus/*/information.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

# NVIDIA_VISIBLE_DEVICES of a container whose devices come from elsewhere (CDI writes "void"), or all of them.
_SAYS_NOTHING = {"", "all", "none", "void"}


@dataclass(frozen=True, slots=True)
class Card:
    """One card. `address`: its PCI address as kernel_lines.card_address writes it; `minor` of its /dev/nvidiaN."""

    address: str
    minor: int | None = None
    uuid: str = ""
    model: str = ""


def used(
    cards: Sequence[Card], environ: Mapping[str, str], *, opened: Collection[int] = (), present: Collection[int] = ()
) -> frozenset[str] | None:
    """Return the addresses of the cards an engine uses; None: not known.

    `opened`: minors its processes were seen to hold open; `present`: minors that have a device file here, empty: none has.
    """
    if not cards:
        return None
    here = [card for card in sorted(cards, key=lambda card: card.address) if not present or card.minor in present]
    container = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    seen = (None if container in _SAYS_NOTHING else _chosen(here, container, in_order=True)) or here
    held = [card for card in seen if card.minor in opened]
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.model for card in seen}) <= 1
    value = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if value is None else _chosen(seen, value, in_order=in_order)
    if chosen is None:
        known = held or (seen if len(seen) == 1 else None)
    else:
        known = [card for card in chosen if card in held] or chosen
    return None if known is None else frozenset(card.address for card in known)


def _chosen(cards: Sequence[Card], value: str, *, in_order: bool) -> list[Card] | None:
    """Read a list of indices or UUIDs; None: nothing we can follow."""
    chosen: list[Card] = []
    for word in (part.strip() for part in value.split(",")):
        if word in {"", "-1", "NoDevFiles"}:
            break  # CUDA ignores what follows an index it does not know
        if word.isdigit():
            if not in_order or int(word) >= len(cards):
                return None
            chosen.append(cards[int(word)])
            continue
        found = [card for card in cards if card.uuid and card.uuid.startswith(word)]
        if len(found) != 1:
            return None
        chosen += found
    return chosen
