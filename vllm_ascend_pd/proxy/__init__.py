# SPDX-License-Identifier: Apache-2.0
"""The proxy: an OpenAI-compatible front door for prefill and decode engines, and the metaserver for their tickets.

Rooms, from the bottom up. Each imports only rooms below it; pyproject.toml has the contract.

- `http/`: requests and responses of clients, and HTTP to engines. Beside it `settings`: options.
- `routing/`: which engines there are, and which one gets a request.
- `rendezvous/`: brings a client's request, its tickets and its prefills together, and retries what fails.
- `operate/`: health, status, metrics and the admin API.
- `server`: the ASGI application with all routes, the work beside requests, and its server.

A client's request, file by file. It is a `ProxiedRequest` all the way (`rendezvous/request_table`).

1. `ClientRequests` (`rendezvous/client_endpoint`) waits for its body (`http/arriving`) and for a slot of the proxy
   (`routing/queue`), and reads the body (`http/bodies`).
2. An attempt begins, under a new id (`RequestTable.attempt`). `ClientRequests` ranks the decode engines
   (`routing/engines`). `EnginePool.open` (`routing/dispatch`) waits until the best one has a free slot
   (`routing/queue`), and sends it the request.
3. The decode engine posts a ticket per prompt and sample. `Metaserver` (`rendezvous/metaserver`) reads it
   (`rendezvous/tickets`), and finds the request that waits for it: the engine's name for its request contains the
   attempt's id (`http/endpoints`). The ticket gets a `Prefill`.
4. `Metaserver` has a prefill engine compute the prompt, by that role's `EnginePool`. Then it answers the ticket.
5. `ResponseRelay` (`rendezvous/client_endpoint`) passes the decode engine's response on to the client. If it fails
   before the client has got anything, another attempt may begin at 2.

`routing/answers` says what follows a failure, `rendezvous/deliveries` which engine it counts against.
`rendezvous/observer` counts what `operate/` shows.
"""
