"""Which replica a request goes to."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

from diffgen.params import SamplingParams


@dataclasses.dataclass
class Load:
    """What is known of a replica's work: requests, and their denoising steps x pixels that are left."""

    requests: int = 0
    cost: float = 0.0


def request_cost(params: SamplingParams, defaults: Mapping[str, object]) -> float:
    """Steps x pixels of all outputs, which grow as tokens do."""

    def value(name: str) -> float:
        found = getattr(params, name) or defaults.get(name) or 1
        return float(found) if isinstance(found, int | float) else 1.0

    names = ("num_inference_steps", "width", "height", "num_frames", "num_outputs_per_prompt")
    cost = 1.0
    for name in names:
        cost *= value(name)
    return cost


class Dispatcher:
    """Chooses by a policy among the replicas that are up.

    ``least_cost`` and ``least_requests`` count what is sent at once, and what the replies tell to be done.
    """

    def __init__(self, policy: str) -> None:
        self._choose: Callable[[SamplingParams, Sequence[int], Mapping[int, Load]], int] = {
            "round_robin": self._round_robin,
            "least_requests": lambda params, up, loads: min(up, key=lambda each: loads[each].requests),
            "least_cost": lambda params, up, loads: min(up, key=lambda each: (loads[each].cost, loads[each].requests)),
            "affinity": _affinity,
        }[policy]
        self._last = -1

    def choose(self, params: SamplingParams, up: Sequence[int], loads: Mapping[int, Load]) -> int:
        """One of ``up``, which is sorted and not empty."""
        return self._choose(params, up, loads)

    def _round_robin(self, params: SamplingParams, up: Sequence[int], loads: Mapping[int, Load]) -> int:
        self._last = next((each for each in up if each > self._last), up[0])
        return self._last


def _affinity(params: SamplingParams, up: Sequence[int], loads: Mapping[int, Load]) -> int:
    """Equal texts go to one replica, whose cache may hold them; another that comes or goes moves few of them."""
    texts = f"{params.prompt}\0{params.negative_prompt}"
    return max(up, key=lambda each: hashlib.sha256(f"{each}\0{texts}".encode()).digest())
