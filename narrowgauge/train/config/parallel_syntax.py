"""Parser of the setting `parallel`: "fsdp=4", "dp=2,fsdp=4", "fsdp".

    dp    model replicas that read different data (DistributedDataParallel); ddp is a synonym
    fsdp  ranks that shard a replica's weights, gradients and optimizer states, and read different
          data (FSDP2)
    tp    ranks that share each matmul and read the same data (tensor parallelism)
    pp    pipeline stages
    sp    without a number: ranks of tp hold different tokens between matmuls (sequence
          parallelism), as "tp=2,sp"

The product of the sizes is the number of ranks. One key may omit its number and gets the remaining
ranks. An empty setting means "dp". Ranks are numbered by stage, then by replica, then within the tp
group, so ranks of a tp group are neighbours.

Imports no torch, so that --help is quick.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.errors import ConfigError, Reason, closest

KEYS = {"dp": "dp", "ddp": "dp", "fsdp": "fsdp", "tp": "tp", "pp": "pp"}
# Each part, and its words in --help
AXES = {
    "dp": "Replicas that read different data.",
    "fsdp": "Ranks that shard the weights, gradients and states of a replica.",
    "tp": "Ranks that share each matmul.",
    "pp": "Stages of a pipeline.",
    "sp": "true: ranks of tp hold different tokens between matmuls.",
}
REST = 0  # size of a key without a number: all remaining ranks


@dataclass(frozen=True)
class Layout:
    """Number of ranks along each axis.

    dp, fsdp, tp, pp  sizes
    sp                sequence parallelism
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False

    @property
    def world(self) -> int:
        return self.data * self.tp * self.pp

    @property
    def data(self) -> int:
        """Number of groups that read different data."""
        return self.dp * self.fsdp

    def share(self, rank: int) -> tuple[int, int]:
        """(index, count) of the rank's group among the groups that read different data."""
        # tp varies fastest: neighbours usually share a machine and its fast links.
        return rank // self.tp % self.data, self.data

    def readers(self, rank: int) -> list[int]:
        """Ranks that read the same data as `rank`, itself included: its tp group in all stages."""
        first = self.share(rank)[0] * self.tp
        return [
            first + stage * self.data * self.tp + place
            for stage in range(self.pp)
            for place in range(self.tp)
        ]

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp}
        words = [f"{key}={size}" for key, size in sizes.items() if size > 1]
        return ",".join([*words, *(["sp"] if self.sp else [])]) or "dp=1"


def layout(text: str, world: int) -> Layout:
    """Sizes for `world` ranks.

    Raises ConfigError if the text is invalid or their product is not `world`.
    """
    sizes, has_own_tokens, wrong = _read(text)
    if wrong:
        raise ConfigError(f"parallel = {text!r}: {wrong[0]}", code=wrong[0].code)
    known = math.prod(size for size in sizes.values() if size != REST)
    # left != 0: the named sizes do not divide the number of ranks.
    rest, left = divmod(world, known)
    sizes = {key: rest if size == REST else size for key, size in sizes.items()}
    # The product also differs if no key is open and the text names fewer ranks than there are.
    if left or math.prod(sizes.values()) != world:
        factors = [str(size) for size in sizes.values() if size > 1]
        needed = " * ".join(factors) + f" = {known}" if len(factors) > 1 else str(known)
        ranks = f"{world} ranks" if world > 1 else "1 rank"
        fitting = "fsdp" if "fsdp" in sizes else "dp"
        kept = {key: sizes[key] for key in ("tp", "pp") if sizes.get(key, 1) > 1}
        if world % math.prod(kept.values()) == 0:
            fitting = ",".join([fitting, *(f"{key}={size}" for key, size in kept.items())])
        raise ConfigError(
            f"parallel = {text!r} needs {needed} rank{'s' if known > 1 else ''}, and this run has {ranks}. "
            f"Start it with torchrun --nproc-per-node {known}, or take parallel = {fitting!r}, which takes all the ranks there are.",
            code="parallel.ranks",
        )
    return _laid_out(sizes, has_own_tokens)


def _laid_out(sizes: Mapping[str, int], has_own_tokens: bool) -> Layout:
    dp, fsdp, tp, pp = (sizes.get(key, 1) for key in ("dp", "fsdp", "tp", "pp"))
    return Layout(dp, fsdp, tp, pp, sp=has_own_tokens and tp > 1)


def names(text: str, key: str) -> bool:
    """True if the text asks for more than one rank along `key`, or leaves its size open."""
    return _read(text)[0].get(key, 1) != 1


def is_open(text: str, key: str) -> bool:
    """True if the text leaves the size along `key` to the number of ranks."""
    return _read(text)[0].get(key) == REST


def named(text: str) -> Layout:
    """Sizes for as many ranks as the text names; a key without a number counts as 1."""
    sizes, has_own_tokens, wrong = _read(text)
    if wrong:
        raise ConfigError(f"parallel = {text!r}: {wrong[0]}", code=wrong[0].code)
    return _laid_out({key: size or 1 for key, size in sizes.items()}, has_own_tokens)


def problems(text: str) -> list[Reason]:
    """Sentences about errors in the text that do not depend on the number of ranks."""
    return _read(text)[2]


def _read(text: str) -> tuple[dict[str, int], bool, list[Reason]]:
    """Returns ({key: size}, sp, errors as sentences)."""
    sizes: dict[str, int] = {}
    has_own_tokens = False
    wrong: list[Reason] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (word.strip() for word in part.partition("="))
        key = KEYS.get(name.lower())
        if name.lower() == "sp":
            has_own_tokens = True
            if equals:
                wrong.append(
                    Reason(
                        "parallel.sp-number",
                        f"{part!r} has a number. Write 'sp': tokens are shared among the ranks of tp.",
                    )
                )
        elif key is None:
            near = closest(name.lower(), KEYS, limit=1)
            wrong.append(
                Reason(
                    "parallel.key",
                    f"{name!r} is none of 'dp', 'fsdp', 'tp', 'pp' and 'sp'. {f'Closest: {near}. ' if near else ''}Write it as 'fsdp=4'.",
                )
            )
        elif key in sizes:
            wrong.append(Reason("parallel.twice", f"{name!r} is given twice. Keep one."))
        elif equals and not re.fullmatch(r"[1-9]\d{0,6}", size):
            wrong.append(
                Reason(
                    "parallel.number", f"{part!r} is no number of ranks. Write it as '{name}=4'."
                )
            )
        else:
            sizes[key] = int(size) if equals else REST
    if sum(size == REST for size in sizes.values()) > 1:
        wrong.append(
            Reason(
                "parallel.two-open",
                "two keys have no number, so what each takes is not known. Give one of them a number.",
            )
        )
    if has_own_tokens and "tp" not in sizes:
        wrong.append(
            Reason(
                "parallel.sp-without-tp",
                "'sp' shares tokens among the ranks of tp, and there is no tp. Write it as 'tp=2,sp'.",
            )
        )
    return sizes or {"dp": REST}, has_own_tokens, wrong
