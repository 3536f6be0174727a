# SPDX-License-Identifier: Apache-2.0
"""Which layer is meant where vllm-ascend announces one without its name, as it does for linear-attention layers
(`ops/gdn.py`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

logger = logging.getLogger(__name__)

# Layer `number` of a stack of layers. A draft's layers are another stack.
_PLACE = re.compile(r"^(?P<stack>.*?\.)(?P<number>\d+)\.")


class UnnamedLayers:
    """Maps announcements without a name by the layers' order. The model's thread owns it.

    The order is checked against the model in every step: by how many of these layers come before each layer that is
    announced by its name, the last one included. Nothing is mapped until a whole step has shown the order. If a later
    step does not, its requests must fail, and nothing is mapped any more.
    """

    def __init__(self, layers: Collection[str], unnamed: Collection[str]) -> None:
        """`layers`: all that the rank has. `unnamed`: those of them that are announced without a name, if at all."""
        found = {layer: match for layer in layers if (match := _PLACE.match(layer))}
        numbers = {layer: int(match["number"]) for layer, match in found.items()}
        stacks = {found[layer]["stack"] if layer in found else "" for layer in unnamed}
        # By the name of a layer in the same stack: how many unnamed layers come before it.
        self._before: dict[str, int] = {}
        # The unnamed layers, in order.
        self._unnamed: list[str] = []
        if len(stacks) == 1 and "" not in stacks:
            self._unnamed = sorted(unnamed, key=numbers.__getitem__)
            for layer, match in found.items():
                if match["stack"] in stacks and layer not in unnamed:
                    self._before[layer] = sum(numbers[each] < numbers[layer] for each in unnamed)
        # A layer with a name must come last. Otherwise the end of the order could not be seen in time.
        self._may_map = max(self._before.values(), default=0) == len(self._unnamed) > 0
        self._shown = False
        self._seen = 0
        # Whether this step's announcements have been in order so far.
        self.in_order = True

    def start_step(self) -> None:
        self._seen, self.in_order = 0, True

    def name(self, layer: str) -> str:
        """Returns the layer that an announcement is for; "" if that is not known. `layer`: the announced name."""
        if layer:
            self.in_order &= self._before.get(layer, self._seen) == self._seen
            return layer
        self._seen += 1
        self.in_order &= self._seen <= len(self._unnamed)
        return self._unnamed[self._seen - 1] if self._shown and self.in_order else ""

    def end_step(self, completed: bool) -> bool:
        """Ends a step. Returns False if what `name` said in it may be wrong.

        `completed`: whether the whole forward pass ran.
        """
        if not completed or not self._may_map or self._seen == 0:  # no hook runs in a graph
            return True
        shown = self.in_order and self._seen == len(self._unnamed)
        if self._shown and not shown:
            logger.error("layers were announced in another order than before: states are sent at the end of steps now")
            self._may_map = self._shown = False
            return False
        self._shown = shown
        return True
