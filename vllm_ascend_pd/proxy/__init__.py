# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible front door for prefill and decode engines, and the metaserver that takes D's tickets.

One request, file by file: `forward` takes the client's request (`bodies` parses it) and opens it on a decode
engine (`engines`); `metaserver` takes that engine's tickets, finds the waiting request in `request_table`, and
runs each ticket's prefill; `forward` streams the decode engine's answer back. What failed on the way is tried again
elsewhere (`retry`) as long as the client has got nothing (`events`), and counted (`counts`). `tracing` says what of
this becomes a span, `otel` sends it.

Which engine: `balance` decides, by what each has to do (`load`) and what the request adds to that (`prompts`); `seats`
bounds it. Which engines there are: `registry`, kept by `discovery` (the command line, `engines_file`, DNS names),
`admin` and, as to their health, `checks`.
"""
