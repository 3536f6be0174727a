# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible front door for prefill and decode engines, and the metaserver that takes D's tickets.

One request, file by file: `forward` takes the client's request (`bodies` parses it) and opens it on a decode
engine (`engines`); `metaserver` takes that engine's tickets, finds the waiting request in `exchange`, and
runs each ticket's prefill; `forward` streams the decode engine's answer back.
"""
