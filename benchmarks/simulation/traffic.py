# SPDX-License-Identifier: Apache-2.0
"""Requests as clients send them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Tokens: `fixed:N`, `uniform:LOW:HIGH`, or `lognormal:MEDIAN:SIGMA` (of the logarithm)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        kind, *numbers = text.split(":")
        wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        if wanted is None or len(numbers) != wanted:
            raise ValueError(f"{text!r} is not like fixed:4096, uniform:100:8000 or lognormal:1500:0.8")
        found = cls(kind, *map(float, numbers))
        if found.first < 1 or found.second < 0 or (kind == "uniform" and found.second < found.first):
            raise ValueError(f"{text!r}: no such lengths")
        return found

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * count
        if self.kind == "uniform":
            return [int(n) for n in random.integers(int(self.first), int(self.second) + 1, count)]
        drawn = self.first * np.exp(self.second * random.standard_normal(count))
        return [max(1, round(n)) for n in drawn]

    @property
    def mean(self) -> float:
        if self.kind == "uniform":
            return (self.first + self.second) / 2
        return float(self.first * np.exp(self.second**2 / 2))


@dataclass(frozen=True)
class Arrival:
    """`salt`: the number drawn from the ticket that chooses among prefill ranks which hold the same."""

    at: float
    prompt: int
    output: int
    salt: int


def poisson(rate: float, seconds: float, prompts: Lengths, outputs: Lengths, seed: int) -> list[Arrival]:
    random = np.random.default_rng(seed)
    count = int(random.poisson(rate * seconds))
    times = np.sort(random.uniform(0.0, seconds, count)).tolist()
    salts = random.integers(0, 1 << 32, count).tolist()
    drawn = zip(times, prompts.draw(random, count), outputs.draw(random, count), salts, strict=True)
    return [Arrival(*each) for each in drawn]
