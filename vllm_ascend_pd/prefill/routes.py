# SPDX-License-Identifier: Apache-2.0
"""The routes of KV from this rank's caches to decode engines of each shape.

The model's thread plans with routes, and the control thread finds a ticket's destinations with them. A route follows
from the shapes alone. So if both threads find one missing, they make the same one.
"""

import logging

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.plan import Route, make_route, why_slow
from vllm_ascend_pd.core.prefill_ticket import Destination, RankKey
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo, Sharding
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout

logger = logging.getLogger(__name__)

# The most routes that are kept: shapes of decode engines, times our geometries. Tickets, which come from outside, name
# the shapes.
_MAX_ROUTES = 4096


class Routes:
    """The routes of one prefill rank."""

    def __init__(self, rank_info: RankInfo, caches: RankCaches) -> None:
        self._rank_info = rank_info
        self._caches = caches
        # By the geometry's index and decode's shape. Both threads read and write it.
        self._routes: dict[tuple[int, Sharding, tuple[int, ...]], Route] = {}
        # Both threads write it. A second warning does no harm.
        self._warned_of_pieces = False

    def route(self, index: int, decode: Sharding, d_block_sizes: tuple[int, ...]) -> Route:
        """Returns the route from caches of the geometry `index` to a decode engine of this shape.

        Raises ValueError if the two sides do not fit."""
        key = (index, decode, d_block_sizes)
        route = self._routes.get(key)
        if route is None:
            geometry = self._caches.geometries[index]
            rank_info = self._rank_info
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            route = make_route(geometry, rank_info.rank, rank_info.sharding, decode, d_block_sizes[geometry.group])
            self._routes[key] = route
            slow = why_slow(route, geometry, rank_info.sharding, decode, d_block_sizes[geometry.group])
            if slow is not None and not self._warned_of_pieces:
                self._warned_of_pieces = True
                logger.warning("%s", slow)
        return route

    def destinations(self, layout: DecodeLayout, ticket: Ticket) -> dict[RankKey, Destination]:
        """Returns the decode ranks that this rank writes to for the ticket, and which of their tensors it covers.

        Raises LookupError or ValueError if the ticket does not fit the layout."""
        block_sizes = tuple(ticket.remote_block_size)
        routes = (
            (index, self.route(index, ticket.sharding, block_sizes))
            for index, geometry in enumerate(self._caches.geometries)
            if geometry.is_known_to(ticket.remote_draft)
        )
        served = tuple((index, route) for index, route in routes if route.serves(ticket.replica_hash))
        covers = layout.covers(self._caches.tensors, served)
        return {key: Destination(rank, indices) for key, (rank, indices) in covers.items()}
