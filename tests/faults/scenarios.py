# SPDX-License-Identifier: Apache-2.0
"""All faults, in the order in which they are injected. Faults that need the same engines follow each other."""

from faults import long_prompt_faults, process_faults, request_faults, router_faults, transfer_faults
from faults.scenario import Scenario

SCENARIOS: list[Scenario] = [
    *process_faults.SCENARIOS,
    *transfer_faults.SCENARIOS,
    *request_faults.SCENARIOS,
    *long_prompt_faults.SCENARIOS,
    *router_faults.SCENARIOS,
]
